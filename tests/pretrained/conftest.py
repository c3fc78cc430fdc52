"""A small model that has learnt something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import fw as run_fw


@pytest.fixture(autouse=True)
def _tokens_are_kept_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FW_CACHE", str(cache))


@pytest.fixture(scope="session")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the documentation that Python carries."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("FW_CACHE", str(cache))
        shape = "hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 192"
        (place / "small.yaml").write_text(
            f"model: {{name: llama, {shape}, initializer_range: 0.05}}\ndata: {{name: text, source: python-docs, vocab_size: 512}}\n"
            "optimizer: {name: adamw, lr: 1e-2}\nschedule: {name: cosine, warmup_steps: 10}\nprecision: fp32\n"
            "train: {max_steps: 120, global_batch_size: 16, sequence_length: 128, val_every: 0, save_every: 120}\n"
        )
        run_fw("train", "small.yaml").ok()
    yield place / "runs" / "small"
