"""Methods of the peft library in fw's models, against peft in transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, disturbed, run, same_gradients
from fw.kinds import make
from fw.kinds.peft import without_adapters
from fw.kinds.quantization import QuantizationPlugin

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BASES = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
}
TARGETS = ["q_proj", "o_proj", "up_proj"]
METHODS: dict[str, dict[str, Any]] = {
    "LOHA": {"r": 4, "alpha": 8},
    "LOKR": {"r": 4, "alpha": 8},
    "HRA": {"r": 4},
    "MISS": {"r": 4},
    "C3A": {"block_size": 16},
    "ROAD": {"group_size": 16},
    "GRALORA": {"r": 4},
    "LORA": {"r": 4, "init_lora_weights": "orthogonal"},
}


def section(method: str, **options: Any) -> dict[str, Any]:
    return {"name": "hf_peft", "type": method, "config": {"target_modules": TARGETS, **METHODS.get(method, {}), **options}}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "LORA"])
def test_an_adapter_of_peft_gives_the_same_logits_and_gradients(tmp_path: Path, method: str) -> None:
    base = base_in(tmp_path, BASES["qwen2" if method in ("LOHA", "HRA") else "llama"])
    options = peft.get_peft_config({"peft_type": method, "task_type": "CAUSAL_LM", "target_modules": TARGETS, **METHODS[method]})
    theirs = disturbed(peft.get_peft_model(base, options), 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = fw.load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    expected, found, plain = theirs(IDS).logits, ours(IDS), fw.load_model(tmp_path / "base")(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3
    with without_adapters():
        assert torch.equal(ours(IDS), plain)
    same_gradients(theirs, ours, expected, found)


@pytest.mark.parametrize("method", METHODS)
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    base = base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method)) == 0
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        found = fw.load_model(checkpoint(tmp_path))(IDS)
    assert (found - theirs).abs().max() < 1e-5
    assert (found - untrained).abs().max() > 1e-4


def test_values_at_the_beginning_are_those_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, BASES["llama"])
    found = []
    for seed in (1, 1, 2):
        overrides = [f"train.seed={seed}", f"train.run_dir=run-{len(found)}", "optimizer.lr=0"]
        assert run(tmp_path, monkeypatch, section("LOHA"), *overrides) == 0
        found.append(load_file(tmp_path / f"run-{len(found)}" / "checkpoints" / "latest" / "adapter_model.safetensors"))
    name = next(name for name in found[0] if name.endswith("q_proj.hada_w1_a"))
    other = name.replace("layers.0", "layers.1")
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[2][name]) and not torch.equal(found[0][name], found[0][other])


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("LOHAA", {}, "'LOHAA' is no method of peft that changes layers"),
        ("PREFIX_TUNING", {}, "no method of peft that changes layers"),
        ("LOHA", {"rang": 3}, "rang"),
        ("OFT", {"oft_block_size": 8}, "keeps what does not train"),
        ("VERA", {"r": 4}, "shared state"),
        ("LOHA", {"target_modules": ["q_prj"]}, "did you mean 'q_proj'"),
        ("LOHA", {"target_modules": ["embed_tokens"]}, "is no linear layer"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, options: dict[str, Any], says: str
) -> None:
    base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section(method, **options)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("quantization", ["nf4", "w8a16", "w4a16"])
@pytest.mark.parametrize("method", ["LOHA", "LOKR", "HRA", "MISS"])
def test_over_codes_it_computes_what_peft_does_over_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, quantization: str
) -> None:
    """HRA turns weights, and the first two take the shape of their change from them: codes are neither."""
    base = base_in(tmp_path, BASES["llama"])
    sizes = {} if quantization == "nf4" else {"group_size": 16}
    assert run(tmp_path, monkeypatch, section(method), f"quantization={json.dumps({'name': quantization, **sizes})}") == 0
    ours = fw.load_model(checkpoint(tmp_path), quantization=make(QuantizationPlugin, quantization, **sizes))
    for name, layer in ours.named_modules():
        if hasattr(layer, "dense_weight"):
            base.get_submodule(f"model.{name}" if not name.startswith("lm_head") else name).weight.data = layer.dense_weight(torch.float32)
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()(IDS).logits
        found = ours(IDS)
    assert (found - theirs).abs().max() < 1e-4
    assert (found - untrained).abs().max() > 1e-4


def test_deepspeed_does_not_bring_what_is_inside_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_in(tmp_path, BASES["llama"])
    assert run(tmp_path, monkeypatch, section("LOHA"), "sharding={name: zero, stage: 3}") == 2
    assert "sharding.stage: 3 brings parameters to the layers that DeepSpeed sees, and hf_peft computes with" in capsys.readouterr().err
