"""Norms that train alone, against peft's LN_TUNING in transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapting import base_in, checkpoint, computes_as_peft, disturbed, peft_computes_as_trained, run, small_configs

peft = pytest.importorskip("peft")

NORMS = {
    "llama": ["input_layernorm", "post_attention_layernorm", "norm"],
    "qwen3": ["q_norm", "model.norm"],
    "gemma2": ["pre_feedforward_layernorm", "norm"],
    "gpt2": ["ln_1", "ln_f"],
}


def section(**config: Any) -> dict[str, Any]:
    return {"name": "hf_peft", "type": "LN_TUNING", "config": config}


@pytest.mark.parametrize("architecture", NORMS)
def test_an_adapter_of_peft_gives_the_same_logits_and_gradients(tmp_path: Path, architecture: str) -> None:
    base = base_in(tmp_path, small_configs()[architecture])
    options = peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=NORMS[architecture])
    computes_as_peft(tmp_path, disturbed(peft.get_peft_model(base, options), 0.1))


@pytest.mark.parametrize("architecture", NORMS)
def test_peft_loads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    base = base_in(tmp_path, small_configs()[architecture])
    assert run(tmp_path, monkeypatch, section(target_modules=NORMS[architecture])) == 0
    peft_computes_as_trained(tmp_path, base)


def test_without_names_all_norms_train_but_those_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_in(tmp_path, small_configs()["llama"])
    assert run(tmp_path, monkeypatch, section(exclude_modules=["model.norm"])) == 0
    layers = [f"base_model.model.model.layers.{layer}" for layer in range(2)]
    ends = ("input_layernorm", "post_attention_layernorm")
    assert set(load_file(checkpoint(tmp_path) / "adapter_model.safetensors")) == {
        f"{layer}.{end}.ln_tuning_layers.weight" for layer in layers for end in ends
    }


def test_it_begins_from_an_adapter_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_in(tmp_path, small_configs()["llama"])
    disturbed(peft.get_peft_model(base, peft.LNTuningConfig(task_type="CAUSAL_LM")), 0.1).save_pretrained(tmp_path / "adapter")
    options = {**section(), "adapter": "adapter"}
    assert run(tmp_path, monkeypatch, options, "optimizer.lr=0") == 0
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(checkpoint(tmp_path) / "adapter_model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in read)
    assert run(tmp_path, monkeypatch, options, "optimizer.lr=0", "train.max_steps=6", "resume=auto") == 0
    assert all(torch.equal(each, read[name]) for name, each in load_file(checkpoint(tmp_path) / "adapter_model.safetensors").items())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"target_modules": ["input_layernrom"]}, "'input_layernrom' is no norm; did you mean 'input_layernorm'?"),
        ({"target_modules": ["q_proj"]}, "'q_proj' is no norm"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules: 'q_proj' names none of the norms that train"),
        ({"exclude_modules": ".*norm"}, "no norm of this model is left to train"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: dict[str, Any], says: str
) -> None:
    base_in(tmp_path, small_configs()["llama"])
    assert run(tmp_path, monkeypatch, section(**config)) == 2
    assert says in capsys.readouterr().err
