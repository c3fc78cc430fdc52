"""`fw prune --layers` of every architecture: transformers loads what is left, and it computes as the whole with the others passed by."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fw
from conftest import fw as run_fw
from fw import registry
from models.architectures import CASES, save

transformers = pytest.importorskip("transformers")

FEW = ["--samples", "4", "--held-out", "4", "--length", "32", "--text", "python-docs"]
IDS = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(1))
STAY = {
    "llama-biases-head_dim": 2,
    "mistral-window": 1,
    "qwen2": 2,
    "qwen2-windows-tied": 2,
    "qwen3-layer_types": 2,
    "gemma2": 4,
    "gemma3": 3,
    "gemma3-stretched": 4,
    "gpt2": 2,
    "mixtral-window": 2,
    "qwen3_moe-mixed": 3,
}


def source(case: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose first block adds least, so that all others get new numbers; with a tokenizer whose ids it knows."""
    monkeypatch.setitem(CASES, case, {**CASES[case], "vocab_size": 512})
    model = save(case, tmp_path / case)
    with torch.no_grad():
        for name, parameter in layers_of(model)[0].named_parameters():
            if "gemma" in case and name.startswith("post_"):
                parameter.fill_(-0.95)  # which has one added to it
            elif any(word in name for word in ("o_proj", "c_proj", "down_proj")):
                parameter.mul_(0.05)
    model.save_pretrained(tmp_path / case)
    for file in (trained / "checkpoints" / "latest").glob("tokenizer*"):
        (tmp_path / case / file.name).write_bytes(file.read_bytes())
    return tmp_path / case


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def theirs(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def passed_by(module: Any, args: tuple[Tensor, ...], out: Any) -> Any:
    return (args[0], *out[1:]) if isinstance(out, tuple) else args[0]


def test_every_architecture_is_here() -> None:
    assert {CASES[case]["model_type"] for case in STAY} == set(registry.declared("model", "hf_model_types"))


@pytest.mark.parametrize("case", STAY)
def test_what_is_left_computes_as_the_whole_without_the_rest(
    case: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = source(case, trained, tmp_path, monkeypatch)
    said = run_fw("prune", str(directory), "--to", str(tmp_path / "shallow"), *FEW, "--layers", str(STAY[case])).ok().err
    gone = [int(number) for number in re.findall(r"block (\d+) \(influence", said)]
    whole, small = theirs(directory), theirs(tmp_path / "shallow")
    layers = layers_of(whole)
    assert small.config.num_hidden_layers == STAY[case] == len(layers) - len(gone) and 0 in gone
    for number in gone:
        layers[number].register_forward_hook(passed_by)
    with torch.no_grad():
        expected = whole(IDS, use_cache=False).logits
        assert torch.allclose(small(IDS, use_cache=False).logits, expected, atol=1e-5)
        assert torch.allclose(fw.load_model(tmp_path / "shallow")(IDS), expected, atol=1e-4)


def refused(tmp_path: Path, directory: Path, *words: str) -> str:
    found = run_fw("prune", str(directory), "--to", str(tmp_path / "no"), *FEW, *words)
    assert found.code == 2 and not (tmp_path / "no").exists() and "blocks; memory" not in found.err
    return found.err.splitlines()[-1]


def test_what_cannot_be_is_refused_before_the_work(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = source("gpt2-variant", trained, tmp_path, monkeypatch)
    assert "--layers: scale_attn_by_inverse_layer_idx divides" in refused(tmp_path, directory, "--layers", "2")
    assert "--heads: GPT2 has none that can be left out (there are: layers)" in refused(tmp_path, directory, "--heads", "2")
    monkeypatch.setitem(CASES, "gemma2", {**CASES["gemma2"], "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4})
    directory = source("gemma2", trained, tmp_path, monkeypatch)
    said = refused(tmp_path, directory, "--heads", "3")
    assert "--heads 3: such a model cannot be: " in said and "3 does not divide hidden_size 40" in said
