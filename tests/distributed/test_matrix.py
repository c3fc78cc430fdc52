"""Every way to divide a run, in fp32 and bf16, against one process: loss and gradient norm over ten steps, accumulating and clipping."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import column, fw
from distributed.operators import HAS_COMPILER, has_libaio
from distributed.ranks import run_ranks

STEPS = 10
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
ON_DISK = "zero 3, optimizer and parameters on disk"
CELLS: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, ["sharding=ddp"]),
    "fsdp": (2, ["sharding=fsdp"]),
    "fsdp tensor 2": (2, ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"]),
    "fsdp context 2": (2, ["sharding=fsdp", "sharding.context=2", "train.micro_batch_size=4"]),
    "fsdp context 2, ring": (2, ["sharding=fsdp", "sharding.context=2", "sharding.context_method=ring", "train.micro_batch_size=4"]),
    "fsdp hsdp 2×2": (4, ["sharding=fsdp", "sharding.replicate=2", "sharding.shard=2", "train.micro_batch_size=1"]),
    "fsdp tensor 2 × shard 2": (4, ["sharding=fsdp", "sharding.tensor=2"]),
    "fsdp context 2 × tensor 2": (4, ["sharding=fsdp", "sharding.context=2", "sharding.tensor=2", "train.micro_batch_size=4"]),
    "fsdp context 4, ring": (4, ["sharding=fsdp", "sharding.context=4", "sharding.context_method=ring", "train.micro_batch_size=4"]),
    "fsdp hsdp 2 × context 2": (4, ["sharding=fsdp", "sharding.replicate=2", "sharding.context=2"]),
    "zero 1": (2, ["sharding=zero", "sharding.stage=1"]),
    "zero 2": (2, ["sharding=zero", "sharding.stage=2"]),
    "zero 3": (2, ["sharding=zero", "sharding.stage=3"]),
    "zero 2, optimizer on the host": (2, ["sharding=zero", "sharding.stage=2", "offload.optimizer=cpu"]),
    "zero 3, optimizer and parameters on the host": (
        2,
        ["sharding=zero", "sharding.stage=3", "offload.optimizer=cpu", "offload.params=cpu"],
    ),
    ON_DISK: (2, ["sharding=zero", "sharding.stage=3", "offload.optimizer=nvme", "offload.params=nvme", "offload.path=disk"]),
}
"""Ranks, and what is set beside tiny.yaml. Each accumulates over two micro-batches."""


def worst(run: Path | str, reference: Path | str) -> float:
    """The largest relative difference in loss and gradient norm over all steps."""
    pairs = [pair for name in ("loss", "grad_norm") for pair in zip(column(reference, name), column(run, name), strict=True)]
    assert len(pairs) == 2 * STEPS
    return max(abs(a - b) / abs(a) for a, b in pairs)


def directory(cell: str, precision: str) -> str:
    return f"{cell} {precision}".replace(" ", "-")


def train_in_turn(ranks: int, cells: list[str]) -> None:
    shared = [f"train.max_steps={STEPS}", "launch.threads=1"]
    overrides = [
        [*CELLS[cell][1], *shared, f"precision={precision}", f"train.run_dir={directory(cell, precision)}"]
        for cell in cells
        for precision in TOLERANCE
    ]
    run_ranks("train_in_turn.py", ranks, overrides)


@pytest.mark.slow
def test_every_division_equals_one_process(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for precision in TOLERANCE:
        one = f"one-{precision}"
        fw(
            "train", "tiny.yaml", f"precision={precision}", f"train.max_steps={STEPS}", "train.micro_batch_size=4", f"train.run_dir={one}"
        ).ok()
        assert max(column(one, "grad_norm")) > 1.0, "clipping must be active for this to test it"
    cells = [cell for cell in CELLS if (cell != ON_DISK or has_libaio()) and ("host" not in cell or HAS_COMPILER)]
    for ranks in sorted({ranks for ranks, _ in CELLS.values()}):
        train_in_turn(ranks, [cell for cell in cells if CELLS[cell][0] == ranks])
    table = {cell: {p: worst(directory(cell, p), f"one-{p}") for p in TOLERANCE} for cell in cells}
    with capsys.disabled():
        print(f"\n\n| largest relative difference from one process over {STEPS} steps | ranks | fp32 | bf16 |\n|---|---|---|---|")
        for cell, found in table.items():
            print(f"| {cell} | {CELLS[cell][0]} | {found['fp32']:.1e} | {found['bf16']:.1e} |")
        for cell in CELLS.keys() - table.keys():
            print(f"| {cell} | {CELLS[cell][0]} | skipped: no {'libaio' if cell == ON_DISK else 'g++'} | |")
    for cell, found in table.items():
        for precision, tolerance in TOLERANCE.items():
            assert found[precision] <= tolerance, f"{cell} in {precision} differs by {found[precision]}"
