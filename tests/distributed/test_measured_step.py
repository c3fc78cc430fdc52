"""The step that is measured, under every way to divide a run: what it says of weights and optimizer state; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import column, fw
from distributed.ranks import run_ranks
from distributed.test_activation import SHARDINGS

KEPT_WHOLE = {"single", "ddp"}


@pytest.mark.slow
def test_what_is_kept_is_said_as_it_is_divided(workspace: Path) -> None:
    shared = ["train.max_steps=3", "launch.threads=1", "precision=fp32"]
    runs = {
        f"{sharding}-{step}": [*how, *shared, f"memory.measure_step={step}", f"train.run_dir={sharding}-{step}"]
        for sharding, how in SHARDINGS.items()
        for step in (0, 2)
    }
    run_ranks("train_in_turn.py", 2, list(runs.values()))
    parameters = 258 * 64 * 2 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # embedding and head, norms, blocks
    for sharding in SHARDINGS:
        assert column(f"{sharding}-0", "loss") == column(f"{sharding}-2", "loss")
        assert json.loads(Path(f"{sharding}-0/summary.json").read_text())["measured_step"] is None
        measured = json.loads(Path(f"{sharding}-2/summary.json").read_text())["measured_step"]
        found = measured["by_category"]
        assert measured["step"] == 2 and sum(found.values()) == measured["peak_bytes"]
        ranks = 1 if sharding in KEPT_WHOLE else 2
        master = 0 if not sharding.startswith("zero") else 4
        held = 1 if sharding in ("zero-1", "zero-2") else ranks
        assert found["weights"] == pytest.approx(4 * parameters / held, rel=0.03), sharding
        assert found["optimizer state"] == pytest.approx((8 + master) * parameters / ranks, rel=0.03), sharding
        assert found["activations"] > 0
        assert sharding.startswith("zero") or found["other"] < 0.01 * measured["peak_bytes"], "but for an engine's buffers"


def test_it_is_told_in_the_summary_and_counts_in_no_rate(workspace: Path) -> None:
    done = fw("train", "tiny.yaml", "train.max_steps=3", "memory.measure_step=2").ok()
    assert "allocated at the peak of step 2" in done.out
    rows = {row[0]: row[-1] for line in done.out.splitlines() if (row := line.split())}
    assert [rows[name] for name in ("parameters", "gradients", "optimizer")] == ["exact"] * 3
    assert "profiler" not in done.err


def test_loggers_have_what_was_predicted_beside_what_was_measured(workspace: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fw("train", "tiny.yaml", "train.max_steps=3", "memory.measure_step=2", "train.log_every=3", "logger=[tensorboard]").ok()
    (events,) = Path("run").rglob("events.out.*")
    told = EventAccumulator(str(events.parent)).Reload()
    for name in ("parameters", "gradients", "optimizer"):
        (measured,), (planned,) = told.Scalars(f"memory/{name}"), told.Scalars(f"memory_planned/{name}")
        assert measured.step == planned.step == 2
        assert measured.value == planned.value > 0


def test_a_step_below_none_is_refused(workspace: Path) -> None:
    done = fw("train", "tiny.yaml", "memory.measure_step=-1")
    assert done.code == 2 and "memory.measure_step" in done.err
