"""Every shipped configuration resolves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import REPOSITORY
from fw.config import load
from fw.recipe import resolve
from fw.server.settings import settings

CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))


BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_resolves(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    of_the_hub = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-0.6B")  # a directory goes first
    for base in ("runs/quickstart", "runs/quickstart/checkpoints/latest", "shallow", *of_the_hub):  # what configs begin from that fine-tune
        (tmp_path / base).mkdir(parents=True, exist_ok=True)
        (tmp_path / base / "config.json").write_text(json.dumps(BASE))
    monkeypatch.chdir(tmp_path)
    if "serve" in load(config).tree:
        assert settings(str(config), []).serve.max_queue > 0
    else:
        assert resolve(load(config), starts=False).accumulation >= 1


def test_there_are_some():
    assert CONFIGS
