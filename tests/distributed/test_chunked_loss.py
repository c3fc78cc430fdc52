"""The loss in chunks under every way to divide a run, against the same division with whole logits; head tied to the embedding or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import column, environment
from distributed.test_activation import SHARDINGS


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
    program = str(Path(__file__).with_name("train_in_turn.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program, json.dumps(list(runs.values()))]
    done = subprocess.run(torchrun, capture_output=True, text=True, env=environment(), timeout=900)
    assert done.returncode == 0, done.stderr[:6000]
    for sharding in SHARDINGS:
        for tied in ("true", "false"):
            for name in ("loss", "grad_norm"):
                whole, chunked = (column(f"{sharding}-{tied}-{tokens}", name) for tokens in (0, 24))
                assert chunked == pytest.approx(whole, rel=1e-6) and len(whole) == 3, (sharding, tied, name)
