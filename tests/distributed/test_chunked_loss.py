"""The loss in chunks under every way to divide a run, against the same division with whole logits; head tied to the embedding or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import column
from distributed.ranks import run_ranks
from distributed.test_activation import SHARDINGS


@pytest.mark.slow
def test_every_division_takes_the_loss_in_chunks(workspace: Path) -> None:
    shared = ["train.max_steps=3", "launch.threads=1", "train.micro_batch_size=2", "train.val_every=2", "objective.z_loss=0.01"]
    shared += ["objective.label_smoothing=0.1"]
    runs = {
        f"{sharding}-{tied}-{tokens}": [
            *how,
            *shared,
            f"model.tie_word_embeddings={tied}",
            f"objective.chunk_tokens={tokens}",
            f"train.run_dir={sharding}-{tied}-{tokens}",
        ]
        for sharding, how in SHARDINGS.items()
        for tied in ("true", "false")
        for tokens in (0, 24)
    }
    run_ranks("train_in_turn.py", 2, list(runs.values()))
    for sharding in SHARDINGS:
        for tied in ("true", "false"):
            for name in ("loss", "grad_norm"):
                whole, chunked = (column(f"{sharding}-{tied}-{tokens}", name) for tokens in (0, 24))
                assert chunked == pytest.approx(whole, rel=1e-6) and len(whole) == 3, (sharding, tied, name)
