"""Somebody's program under torchrun that trains more than once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from distributed.ranks import run_ranks
from fw.meter.document import MemoryDocument
from fw.planning.plan import plan

SAME = ["train.max_steps=2", "train.global_batch_size=8", "data={name: synthetic, vocab_size: 300, samples: 64}"]


@pytest.mark.parametrize("own", [False, True], ids=["no group of its own", "a group of its own"])
def test_each_run_meets_its_own_ranks_and_keeps_its_own_budget(workspace: Path, own: bool) -> None:
    tree = yaml.safe_load((workspace / "tiny.yaml").read_text())
    del tree["train"]["micro_batch_size"]
    tree["optimizer"] = {"lr": 1e-3}
    (workspace / "free.yaml").write_text(yaml.safe_dump(tree))
    whole, divided = (plan("free.yaml", *SAME, f"sharding={name}", "launch.devices=2").largest.allocated_peak for name in ("ddp", "fsdp"))
    budgets = [whole * 2, int(divided * 0.9)]  # as one likes, and less than the whole batch takes in any sharding
    runs = [[*SAME, f"memory.budget={budget}B", f"train.run_dir=run{i}"] for i, budget in enumerate(budgets)]
    runs = [] if own else runs
    runs += [[*SAME, "train.micro_batch_size=2", f"sharding={name}", f"train.run_dir={name}"] for name in ("zero", "zero", "fsdp")]
    runs[-2][-1] = "train.run_dir=zero-again"
    if not own:  # the first rank alone plans what is measured, and DeepSpeed's numbers must be alike for all that
        stage_3 = [*SAME, "train.micro_batch_size=2", "sharding={name: zero, stage: 3}", "memory.measure_step=2"]
        runs = [[*stage_3, "train.run_dir=zero-3"], *runs, [*stage_3, "train.run_dir=zero-3-again"]]
    run_ranks("again.py", 2, {"own": own, "runs": runs})
    assert Path("fsdp/summary.json").exists()
    if own:
        return
    measured = [MemoryDocument.from_json(json.loads(Path(f"run{i}/memory.json").read_text())).largest for i in range(2)]
    assert measured[1].allocated_peak <= budgets[1] < measured[0].allocated_peak <= budgets[0]
    chosen = [json.loads(Path(name, "fit.json").read_text()) for name in ("run0", "run1")]
    assert chosen[0]["chosen"] != chosen[1]["chosen"]
