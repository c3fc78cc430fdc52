"""Mixtures of experts in fewer bits: linear layers are codes, stacked experts and routers what they were; against other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
import tokens
from conftest import fw as run_fw

transformers = pytest.importorskip("transformers")
SHAPE = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**SHAPE, intermediate_size=64, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=32, intermediate_size=128, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path / "base")
    tokens.save(tmp_path / "base", 64)
    return tmp_path / "base"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(IDS)
    return getattr(found, "logits", found).float()


def apart(directory: Path) -> dict[str, torch.Tensor]:
    """Experts and routers."""
    found = load_file(directory / "model.safetensors")
    return {name: value for name, value in found.items() if ".experts." in name or name.endswith(".gate.weight")}


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_fw_quantize_leaves_experts_and_says_so(base: Path, tmp_path: Path, method: str) -> None:
    """What the directory stands for, by compressed-tensors' own code in transformers' own model, is what fw computes with."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    few = ["--samples", "4", "--held-out", "2", "--length", "16", "--text", "python-docs"]
    done = run_fw("quantize", str(base), "--to", str(tmp_path / "q"), "--method", method, "--group-size", "32", *few, "--json").ok()
    assert "stacked experts keep their weights, " in done.err and "transformers takes experts to be packed" in done.err
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    kept = apart(base)
    assert len(kept) > 12 and all(torch.equal(after[name], value) for name, value in kept.items())
    packed = [name.removesuffix("_packed") for name in after if name.endswith("_packed")]
    assert len(packed) == json.loads(done.out)["layers"] and all(name.split(".")[-2] in LAYERS for name in packed)

    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert "re:.*[.]experts([.].*)?" in config["ignore"]
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    dense = {name: value for name, value in after.items() if name in before}
    for name in packed:
        stored = {f"weight{part}": after[f"{name}{part}"] for part in ("_packed", "_scale", "_shape")}
        dense[name] = compressor.decompress(stored, scheme)["weight"]
    assert dense.keys() == before.keys()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name in packed:
        theirs.get_parameter(name).data.copy_(dense[name])
    expected = logits(theirs)
    for ours in (fw.load_model(tmp_path / "q"), fw.load_model(tmp_path / "q", quantization="none")):
        assert (logits(ours) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits(transformers.AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 1e-2 * expected.abs().max()

    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):  # or docs/quantization.md says too little of it
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_4_and_8_bits_are_read_by_transformers(base: Path, tmp_path: Path, quantization: str) -> None:
    pytest.importorskip("bitsandbytes")
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization=quantization)
    made = fw.save_model(ours, tmp_path / "made")
    kept, after = apart(base), load_file(made / "model.safetensors")
    assert len(kept) > 12 and all(torch.equal(after[name], value.bfloat16()) for name, value in kept.items())
    assert all(name.split(".")[-2] in LAYERS for name in ours.quantized) and len(ours.quantized) >= 8
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16, device_map="cpu")
    expected, found = logits(theirs), logits(fw.load_model(made, dtype=torch.bfloat16))
    assert (found - expected).norm() <= 3e-2 * expected.norm()
    assert (found - logits(transformers.AutoModelForCausalLM.from_pretrained(base))).norm() > 0
