"""LoRA and DoRA against peft: the same logits, the same gradients, files that either reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from fw.cli import main
from fw.pretrained.reading import peft_for
from live import assemblies

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
BIASED = transformers.Qwen2Config(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
TIED = transformers.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "all-linear": (LLAMA, {"target_modules": "all-linear"}),
    "some": (LLAMA, {"target_modules": ["q_proj", "v_proj"]}),
    "expression": (LLAMA, {"target_modules": r".*layers\.1\.self_attn\.(k|o)_proj"}),
    "excluded": (LLAMA, {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.0.mlp.down_proj"]}),
    "ranks": (
        LLAMA,
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 5}},
    ),
    "rslora": (LLAMA, {"target_modules": ["q_proj"], "use_rslora": True}),
    "dora": (LLAMA, {"target_modules": "all-linear", "use_dora": True}),
    "dora-biased": (BIASED, {"target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "embedding-and-head": (LLAMA, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "tied": (TIED, {"target_modules": "all-linear"}),
    "whole": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "bias-all": (BIASED, {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "bias-lora_only": (BIASED, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "gpt2": (GPT2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))


def made_by_peft(directory: Path, case: str, disturbed: bool = True) -> Any:
    """A base and an adapter of it in files; the model of peft that wrote them."""
    config, options = CASES[case]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    base.save_pretrained(directory / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and disturbed:
            parameter.data.add_(torch.randn_like(parameter) * (0.01 if "magnitude" in name else 0.1))
    model.save_pretrained(directory / "adapter")
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_gives_the_same_logits(tmp_path: Path, case: str) -> None:
    theirs = made_by_peft(tmp_path, case)
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    with torch.no_grad():
        expected, found, plain = theirs(IDS).logits, ours(IDS), fw.load_model(tmp_path / "base")(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_peft(tmp_path: Path, case: str) -> None:
    theirs = made_by_peft(tmp_path, case)
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert ours.adapters is not None
    for logits in (theirs(IDS).logits, ours(IDS)):
        logits.square().sum().backward()
    frozen = [name for name, parameter in ours.named_parameters() if name not in ours.adapters.tensors]
    assert frozen and not any(ours.get_parameter(name).requires_grad for name in frozen)
    for parameter in ours.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    checked = 0
    for name, of in ours.adapters.tensors.items():
        wanted = expected[of.name].t() if of.transposed else expected[of.name]
        found = ours.get_parameter(name)
        assert wanted.abs().max() > 0 and (found - wanted).abs().max() <= 2e-5 * wanted.abs().max().clamp(min=1), name
        checked += 1
    assert checked == len(expected) - sum(name.endswith("base_layer.weight") for name in expected)


CONFIG = """
model: {{name: auto, path: {base}}}
peft: {peft}
data: {{name: synthetic, vocab_size: 40, samples: 16}}
train: {{global_batch_size: 4, sequence_length: 16, max_steps: 3, save_every: 3, run_dir: run, sample_tokens: 0}}
optimizer: {{name: adamw, lr: 3.0e-2}}
launch: {{accelerator: cpu}}
"""


def trained(directory: Path, case: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """The checkpoint of a run whose adapters are those of a case."""
    made_by_peft(directory, case)
    plugin = peft_for(directory / "adapter")
    options = {key: value for key, value in vars(plugin.config).items() if value}
    name = "dora" if CASES[case][1].get("use_dora") else "lora"
    (directory / "run.yaml").write_text(CONFIG.format(base=directory / "base", peft=json.dumps({"name": name, **options})))
    monkeypatch.chdir(directory)
    assert main(["train", "run.yaml", *overrides]) == 0
    return (directory / "run" / "checkpoints" / "latest").resolve()


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    runs = assemblies(monkeypatch)
    decaying = ["optimizer.weight_decay=0.1", "train.gradient_clip_norm=0.05"]
    checkpoint = trained(tmp_path, case, monkeypatch, *decaying)
    assert not list(checkpoint.glob("model*")) and not (checkpoint / "config.json").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint).eval()
        ours = fw.load_model(checkpoint)
        expected, found = theirs(IDS).logits, ours(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - untrained).abs().max() > 1e-3
    (live,) = (run.model for run in runs)
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert live.adapters is not None
    frozen = {name: tensor for name, tensor in live.base().items() if name not in live.adapters.tensors}
    for name, tensor in frozen.items():
        (of,) = live.hf_tensors(name)
        assert torch.equal(tensor.t() if of.transposed else tensor, before[of.name]), name
    assert len(frozen) > 5
    for name, of in live.adapters.tensors.items():
        now = live.get_parameter(name).detach()
        was = before.get(of.name.removeprefix("base_model.model.").replace(".base_layer.", "."), torch.zeros(()))
        assert not torch.equal(now.t() if of.transposed else now, was.expand(now.shape) if not was.dim() else was), name
