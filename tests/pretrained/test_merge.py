"""Merged adapters against peft's own ``merge_and_unload``."""

from __future__ import annotations

import json

import pytest
import torch

from fw.cli import main

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
GPT2 = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=4, n_positions=16)
ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "plain": (LLAMA, {"target_modules": ATTENTION}),
    "patterns": (LLAMA, {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 5}}),
    "rslora": (LLAMA, {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": (LLAMA, {"target_modules": ATTENTION, "use_dora": True}),
    "embedding": (LLAMA, {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}),
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
