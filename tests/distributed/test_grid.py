"""Every pair of an activation, an optimizer, a division and a precision: two steps with the right loss, or a refusal that says why."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import column, environment, fw
from distributed.ranks import run_ranks

ACTIVATIONS = {name: [f"activation={name}"] for name in ("none", "full", "every_n", "ratio", "sqrt", "selective", "modules")}
ACTIVATIONS["auto"] = ["activation={name: auto, budget: 400KiB}"]
OPTIMIZERS = {
    name: [f"optimizer={name}"]
    for name in (
        "adafactor",
        "adamw",
        "adamw_8bit",
        "adamw_bf16",
        "lamb",
        "lion",
        "lion_8bit",
        "muon",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "sgd",
    )
}
SHARDINGS = {
    "single": ["sharding=single"],
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "tensor": ["sharding=fsdp", "sharding.tensor=2"],
    "context": ["sharding=fsdp", "sharding.context=2"],
    "zero 1": ["sharding=zero", "sharding.stage=1"],
    "zero 2": ["sharding=zero", "sharding.stage=2"],
    "zero 3": ["sharding=zero", "sharding.stage=3"],
}
PRECISIONS = {name: [f"precision={name}"] for name in ("fp32", "bf16", "bf16_true", "fp16", "fp8")}
PRECISIONS["phased"] = ["precision={name: phased, phases: [{from_step: 0, compute: bf16}, {from_step: 1, compute: fp32}]}"]
AXES = (ACTIVATIONS, OPTIMIZERS, SHARDINGS, PRECISIONS)
SHARED = ["train.max_steps=2", "launch.threads=1", "model.num_hidden_layers=4", "train.micro_batch_size=2"]
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-3, "bf16_true": 1e-2, "fp16": 2e-3, "fp8": 2e-3, "phased": 2e-3}
BY_ROWS_OR_WHOLE = ("adafactor", "adamw_8bit", "lamb", "lion_8bit", "muon", "paged_adamw_8bit")
REFUSALS = {
    "zero joins parameters into one flat tensor": lambda o, s, p: o in BY_ROWS_OR_WHOLE and "zero" in s,
    "8-bit state comes in blocks": lambda o, s, p: o in ("adamw_8bit", "lion_8bit", "paged_adamw_8bit") and s == "tensor",
    "DeepSpeed places optimizer state itself": lambda o, s, p: o == "paged_adamw_32bit" and "zero" in s,
    "zero computes in float16 only on processors": lambda o, s, p: p == "fp16" and "zero" in s,
    "DeepSpeed's engine keeps its weights for forward in one dtype": lambda o, s, p: p == "phased" and "zero" in s,
}
Cell = tuple[str, str, str, str]


def covering() -> list[Cell]:
    """Cells in which every pair of choices stands, few of them: each next one has the most pairs that none before has.

    A pair counts where it trains; one that never does, in a cell that is refused.
    """
    axes = [[(number, choice) for choice in axis] for number, axis in enumerate(AXES)]
    left = {pair for a, b in itertools.combinations(axes, 2) for pair in itertools.product(a, b)}
    chosen = []
    for is_refused in (False, True):
        cells = [cell for cell in itertools.product(*AXES) if bool(refused_for(cell)) == is_refused]
        pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
        while pairs[best := max(cells, key=lambda cell: len(pairs[cell] & left))] & left:
            left -= pairs[best]
            chosen.append(best)
    assert not left
    return chosen


def words(cell: Cell) -> list[str]:
    return [word for axis, choice in zip(AXES, cell, strict=True) for word in axis[choice]] + SHARED


def refused_for(cell: Cell) -> list[str]:
    """Which rules stand against it."""
    return [why for why, stands in REFUSALS.items() if stands(*cell[1:])]


def tried(cells: dict[str, Cell], ranks: int) -> dict[str, str]:
    done = run_ranks("try_in_turn.py", ranks, {name: words(cell) for name, cell in cells.items()})
    came: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return came


@pytest.mark.slow
def test_every_pair_trains_or_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {f"cell-{number}": cell for number, cell in enumerate(covering())}
    plain = {f"plain-{o}-{p}": ("none", o, "single", p) for o in OPTIMIZERS for p in PRECISIONS}
    one = {name: cell for name, cell in cells.items() if cell[2] == "single"}
    came = tried({**plain, **one}, 1) | tried({name: cell for name, cell in cells.items() if name not in one}, 2)
    refused = 0
    for name, cell in cells.items():
        assert name in came, (cell, came)
        why = refused_for(cell)
        if came[name].startswith("refused: "):
            refused += 1
            assert any(text in came[name] for text in why), (cell, came[name])
            continue
        assert came[name] == "" and not why, (cell, came[name])
        _, optimizer, _, precision = cell
        for key in ("loss", "grad_norm"):
            close = TOLERANCE[precision] * (10 if key == "grad_norm" else 1)
            expected = column(f"plain-{optimizer}-{precision}", key)
            assert column(name, key) == pytest.approx(expected, rel=close), (cell, key)
    with capsys.disabled():
        print(f"\n{len(cells)} cells hold all pairs: {len(cells) - refused} train as they should, {refused} are refused with their reason")
    assert refused == sum(bool(refused_for(cell)) for cell in cells.values()) < len(cells) / 2


FLAT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from fw.assemble import assemble
from fw.config import load
from fw.recipe import current_world, resolve
recipe = resolve(load("tiny.yaml", ["sharding=zero"]), current_world())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made = assemble(recipe, 258, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), torch.device("cpu"))
groups = made.stepper.module.basic_optimizer.param_groups
print([parameter.dim() for group in groups for parameter in group["params"]])
"""


def test_deepspeed_gives_an_optimizer_flat_tensors(workspace: Path) -> None:
    """Why zero refuses optimizers that see rows or whole parameters."""
    done = subprocess.run([sys.executable, "-c", FLAT], capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == {1}


def test_deepspeed_takes_fp16_where_zero_does(workspace: Path) -> None:
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    done = fw("train", "tiny.yaml", "sharding=zero", "precision=fp16", "train.max_steps=1")
    assert (done.code == 0) == bool(accelerator.is_fp16_supported()), done.err  # DeepSpeed says None of a processor that does not
