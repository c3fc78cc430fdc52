"""Recomputation under every way to divide a run: the same losses and gradient norms, to the bit, as the same division without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import column
from distributed.ranks import run_ranks

SHARDINGS = {
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "fsdp-tensor": ["sharding=fsdp", "sharding.tensor=2"],
    "fsdp-context": ["sharding=fsdp", "sharding.context=2"],
    "zero-1": ["sharding=zero", "sharding.stage=1"],
    "zero-3": ["sharding=zero", "sharding.stage=3"],
}
ACTIVATIONS = ["none", "full", "sqrt", "selective", "modules", "{name: auto, budget: 400KiB}"]


@pytest.mark.slow
def test_every_division_recomputes(workspace: Path) -> None:
    shared = ["train.max_steps=3", "launch.threads=1", "train.micro_batch_size=2", "model.num_hidden_layers=4", "train.val_every=2"]
    runs = {
        f"{sharding}-{number}": [*how, *shared, f"activation={activation}", f"train.run_dir={sharding}-{number}"]
        for sharding, how in SHARDINGS.items()
        for number, activation in enumerate(ACTIVATIONS)
    }
    done = run_ranks("train_in_turn.py", 2, list(runs.values()))
    for sharding in SHARDINGS:
        for number, activation in enumerate(ACTIVATIONS):
            for name in ("loss", "grad_norm"):
                found, expected = (column(f"{sharding}-{which}", name) for which in (number, 0))
                assert found == expected and len(found) == 3, (sharding, activation, name)
    told = [line for line in done.stderr.splitlines() if "activations: blocks keep" in line]
    assert len(told) == len(SHARDINGS), "rank 0 tells"
    assert all("repeat 100%" not in line and "repeat 0%" not in line for line in told), told
