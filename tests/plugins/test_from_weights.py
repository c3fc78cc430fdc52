"""Methods of the peft library that take what they are from the weights that they change, against peft in transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fw
from adapting import IDS, SIZES, base_in, checkpoint, peft_computes_as_trained, run

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "DEFT": {"r": 4},
    "PSOFT": {"r": 4},
    "SUPERTUNING": {"sparsity": 0.9, "r": 2, "lora_alpha": 4},
}


def section(method: str, **options: Any) -> dict[str, Any]:
    targets = ["q_proj", "o_proj", "up_proj"]
    return {"name": "hf_peft", "type": method, "config": {"target_modules": targets, **OPTIONS[method], **options}}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("PSOFT", {"psoft_svd": "lowrank", "random_seed": 3, "psoft_orth": False}),
        ("SUPERTUNING", {"save_precomputed_indices": False}),
        ("SUPERTUNING", {"select_top": False, "r": None, "lora_alpha": None}),
        ("DEFT", {"para": False}),
    ],
)
def test_what_is_taken_from_weights_is_what_peft_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    """At the beginning, when a run goes on, and wherever no file holds it."""
    base = base_in(tmp_path, LLAMA)
    for steps in (3, 6):
        assert run(tmp_path, monkeypatch, section(method, **options), f"train.max_steps={steps}", "resume=auto") == 0
    peft_computes_as_trained(tmp_path, base)
    again = run(tmp_path, monkeypatch, section(method, **options), "train.max_steps=6", "train.run_dir=straight", "train.save_every=6")
    assert again == 0
    straight = load_file(tmp_path / "straight" / "checkpoints" / "latest" / "adapter_model.safetensors")
    assert all(torch.equal(straight[name], each) for name, each in load_file(checkpoint(tmp_path) / "adapter_model.safetensors").items())


@pytest.mark.parametrize(("method", "options"), [("DEFT", {"para": False}), ("PSOFT", {}), ("SUPERTUNING", {})])
def test_what_begins_from_weights_changes_nothing_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    """DEFT projects weights along random directions and adds what is lost by that."""
    base = base_in(tmp_path, LLAMA)
    assert run(tmp_path, monkeypatch, section(method, **options), "optimizer.lr=0") == 0
    with torch.no_grad():
        assert (fw.load_model(checkpoint(tmp_path))(IDS) - base(IDS).logits).abs().max() < 1e-5
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(tmp_path)).eval()
        assert (theirs(IDS).logits - fw.load_model(tmp_path / "base")(IDS)).abs().max() < 1e-5


@pytest.mark.parametrize("method", ["PSOFT", "SUPERTUNING"])
def test_from_codes_there_is_nothing_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    base_in(tmp_path, LLAMA)
    assert run(tmp_path, monkeypatch, section(method), "quantization=nf4") == 2
    says = f"{method} takes what it is from weights, of which model.layers.0.self_attn.q_proj keeps codes"
    assert says in capsys.readouterr().err
