"""Weights as codes that kernels compute with: against the model whose weights are what the codes stand for, in fp32."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fw
import tokens
from fw.errors import UserError
from fw.kernels import linear
from fw.kernels.grouped import GroupedLinear
from fw.kernels.linear import PackedLinear
from fw_plugins.quantization.weight_only import W4A16, WeightOnlyConfig
from models.architectures import VOCABULARY

pytestmark = pytest.mark.skipif(not linear.available(), reason="no compiler")
LAYERS, PROJECTIONS = 3, 7
QUANTIZATIONS = {
    "w4a16": {"name": "w4a16", "group_size": 32},
    "w4a16, with zeros": {"name": "w4a16", "group_size": 64, "symmetric": False},
    "w4a16, by rows": {"name": "w4a16", "group_size": -1},
    "w8a16": {"name": "w8a16", "group_size": 32},
    "w8a16, with zeros": {"name": "w8a16", "group_size": 32, "symmetric": False},
    "nf4": {"name": "nf4"},
    "nf4, plain scales": {"name": "nf4", "double_quantization": False, "block_size": 32},
    "fp4": {"name": "fp4"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of a model whose weights differ more than those that it would begin with, in bfloat16."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, attention_bias=True, **shape)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(place)
    tokens.save(place, VOCABULARY)
    return place


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(tokens.FIRST, VOCABULARY, (length,), generator=generator).tolist() for length in (70, 12, 5, 33)]


def off(rows, right) -> float:
    """Root of the mean square of differences."""
    differences = [a - b for row, one in zip(rows, right, strict=True) for a, b in zip(row, one, strict=True)]
    return torch.tensor(differences).square().mean().sqrt().item()


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_products_with_codes(directory, name, monkeypatch):
    """Nearer to what the codes stand for than products with weights rounded to bfloat16 are, and the same alone as in company."""
    given = QUANTIZATIONS[name]
    whole = fw.LLM(directory, dtype="fp32", quantization=given)
    llm = fw.LLM(directory, dtype="bf16", quantization=given)
    made = [module for module in llm.model.modules() if isinstance(module, GroupedLinear)]
    assert len(made) == LAYERS * PROJECTIONS
    monkeypatch.setattr(GroupedLinear, "takes", staticmethod(lambda codes: False))
    rounded = fw.LLM(directory, dtype="bf16", quantization=given)
    assert not any(isinstance(module, GroupedLinear) for module in rounded.model.modules())
    settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "ignore_eos": True}
    right, found, other = ([r.prompt_logprobs for r in each.generate(prompts(), **settings)] for each in (whole, llm, rounded))
    assert off(found, right) < 1.1 * off(other, right) < 0.1
    settings = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    alone = [llm.generate(prompt, **settings)[0] for prompt in prompts()]
    assert [(r.token_ids, r.logprobs) for r in llm.generate(prompts(), **settings)] == [(r.token_ids, r.logprobs) for r in alone]


def test_codes_are_not_made_of_codes(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "tied")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "tied" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    why = r"inference\.weights: w8a8 is of plain layers in bfloat16 on the CPU, and the model has none: where its layers are codes already"
    with pytest.raises(UserError, match=why):
        fw.LLM(tmp_path / "tied", dtype="bf16", quantization="nf4", weights="w8a8")


def test_files_with_codes(directory, tmp_path):
    """Are read into the kernel's form as they are, and take what they took."""
    model = fw.load_model(directory, dtype=torch.bfloat16, quantization=W4A16(WeightOnlyConfig(32)))
    fw.save_model(model, tmp_path / "coded", fw.load_tokenizer(directory))
    settings = {"max_tokens": 15, "temperature": 0, "ignore_eos": True}
    coded = fw.LLM(tmp_path / "coded", dtype="bf16")
    made = fw.LLM(directory, dtype="bf16", quantization=QUANTIZATIONS["w4a16"])
    assert [r.logprobs for r in coded.generate(prompts(), **settings)] == [r.logprobs for r in made.generate(prompts(), **settings)]
    kept = sum(module.weight_bytes for module in coded.model.modules() if isinstance(module, GroupedLinear))
    weights = sum(module.in_features * module.out_features for module in coded.model.modules() if isinstance(module, GroupedLinear))
    assert kept <= (0.5 + 4 / 32) * weights + 32 * LAYERS * PROJECTIONS
    assert coded.engine.reads.step_bytes >= kept
    assert any(type(module) is PackedLinear for module in coded.model.modules()), "the head has no codes"
