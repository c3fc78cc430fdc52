"""Merged adapters against peft's own ``merge_and_unload``."""

from __future__ import annotations

import json

import pytest
import torch

import fw
from fw.cli import main
from fw.errors import UserError
from fw.meter.allocations import allocations
from fw.pretrained import changes

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
WIDER = transformers.LlamaConfig(**{**LLAMA.to_dict(), "hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
QWEN2 = transformers.Qwen2Config(**{**LLAMA.to_dict(), "model_type": "qwen2", "use_sliding_window": False})
GPT2 = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=4, n_positions=16)
ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "plain": (LLAMA, {"target_modules": ATTENTION}),
    "patterns": (LLAMA, {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 5}}),
    "rslora": (LLAMA, {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": (LLAMA, {"target_modules": ATTENTION, "use_dora": True}),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}),
    "biases": (QWEN2, {"target_modules": ATTENTION, "bias": "all"}),
    "biases-of-changed-layers": (QWEN2, {"target_modules": ATTENTION, "bias": "lora_only"}),
    "biases-dora": (QWEN2, {"target_modules": ATTENTION, "bias": "lora_only", "use_dora": True}),
    "biases-transposed": (GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "all"}),
    "transposed": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "transposed-dora": (GPT2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}


def make(tmp_path, case, dtype=torch.float32):
    config, options = CASES[case]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, **options))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter) if "magnitude" in name else torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path / "adapter")
    return model.merge_and_unload().state_dict()


def merge(tmp_path, *options):
    return main(["checkpoint", "merge", str(tmp_path / "base"), str(tmp_path / "adapter"), "--to", str(tmp_path / "made"), *options])


@pytest.mark.parametrize("case, dtype", [*((case, torch.float32) for case in CASES), ("plain", torch.bfloat16), ("dora", torch.bfloat16)])
def test_equal_to_peft(tmp_path, case, dtype):
    expected = make(tmp_path, case, dtype)
    assert merge(tmp_path) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=dtype).state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().max().float()
        assert (tensor - expected[name]).abs().max().float() <= (1e-5 if dtype == torch.float32 else 1e-2) * max(1.0, scale), name
    assert any((found[name] - before[name]).abs().max() > 0.1 for name in found)


LIKE = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 1e-2)}
"""How near logits of a merged model are to those of base and adapter, in parts of their norm; as near as those are in bf16 to fp32."""


@pytest.mark.parametrize("bits", [None, "nf4"])
@pytest.mark.parametrize("dtype", LIKE)
@pytest.mark.parametrize("dora", [False, True])
def test_logits_are_those_of_the_base_with_the_adapter_beside_it(tmp_path, dora, dtype, bits):
    kept_as, tolerance = LIKE[dtype]
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(WIDER).to(kept_as)
    base.save_pretrained(tmp_path / "base")
    ids = torch.randint(0, 24, (2, 12))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=dora))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * (0.01 if "magnitude" in name else 0.05))
    model.save_pretrained(tmp_path / "adapter")
    if bits:
        (tmp_path / "base").rename(tmp_path / "plain")
        fw.save_model(fw.load_model(tmp_path / "plain", dtype=kept_as, quantization=bits), tmp_path / "base")
    assert merge(tmp_path) == 0
    with torch.no_grad():
        plain = fw.load_model(tmp_path / "base", dtype=kept_as)(ids).float()
        expected = fw.load_model(tmp_path / "base", dtype=kept_as, adapter=tmp_path / "adapter")(ids).float()
        found = fw.load_model(tmp_path / "made", dtype=kept_as)(ids).float()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=kept_as)(ids).logits.float()
    with pytest.raises(UserError, match="the model has an adapter, which a model directory cannot hold; fw checkpoint merge"):
        fw.save_model(fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter"), tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    assert (expected - plain).norm() > 0.1 * expected.norm()
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert (theirs - expected).norm() <= tolerance * expected.norm()


WIDE = transformers.LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
)
HEAD_BYTES = 4096 * 512 * 4
WIDE_CASES = {
    "head": peft.LoraConfig(r=4, target_modules=["lm_head"]),
    "dora": peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True),
    "embedding": peft.LoraConfig(r=4, target_modules=["embed_tokens"]),
    "ia3": peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
    "whole": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bf16"]])
@pytest.mark.parametrize("case", WIDE_CASES)
def test_memory_is_the_largest_tensor_and_some_of_its_rows(tmp_path, monkeypatch, case, dtype):
    """By the allocator's own events; what is read lies in mapped files."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(WIDE)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, WIDE_CASES[case])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    piece = 1 << 18
    assert 3 * changes._SLICE_BYTES < 2 << 30, "what is promised beyond the largest file"
    monkeypatch.setattr(changes, "_SLICE_BYTES", piece)
    with allocations(torch.device("cpu")) as found:
        assert merge(tmp_path, *dtype) == 0
    mapped = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors") if path.parent.name != "made")
    written = HEAD_BYTES // (2 if dtype else 1)
    adapters = sum(4 * 4 * (4096 + 512) for _ in range(2))
    assert written <= found.peak_bytes - mapped <= written + 3 * piece + adapters, found.peak_bytes - mapped - written


def test_in_another_dtype(tmp_path):
    make(tmp_path, "plain")
    assert merge(tmp_path, "--dtype", "bf16") == 0
    assert json.loads((tmp_path / "made/config.json").read_text())["dtype"] == "bfloat16"


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    make(tmp_path, "plain")
    path, weights = tmp_path / "adapter/adapter_config.json", tmp_path / "adapter/adapter_model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(weights)
    save_file({**tensors, "base_model.model.other.lora_A.weight": torch.zeros(4, 16)}, weights)
    assert merge(tmp_path) == 2 and "base_model.model.other.lora_A.weight" in capsys.readouterr().err
    path.write_text(json.dumps({**config, "peft_type": "LOHA"}))
    assert merge(tmp_path) == 2 and "LOHA" in capsys.readouterr().err
    path.write_text(json.dumps(config))
    weights.rename(weights.with_suffix(".bin"))
    assert merge(tmp_path) == 2 and "pickle" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
