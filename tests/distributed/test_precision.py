"""Precisions where parameters are divided: which dtypes are kept, phases that follow each other, and evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import column, fw
from distributed.ranks import run_ranks

PHASES = "phases: [{from_step: 0, compute: bf16}, {from_step: 3, compute: fp32}]"
PHASED = f"precision={{name: phased, {PHASES}}}"
PRECISIONS = {
    "fp32": (["precision=fp32"], "float32", "float32"),
    "bf16": (["precision=bf16"], "float32", "bfloat16"),
    "bf16_true": (["precision=bf16_true"], "bfloat16", "bfloat16"),
    "fp16": (["precision=fp16"], "float32", "float16"),
    "fp8": (["precision=fp8"], "float32", "bfloat16"),
    "phased": ([PHASED], "float32", "bfloat16"),
    "phased bf16": (["precision={name: phased, parameters: bf16, phases: [{compute: bf16}]}"], "bfloat16", "bfloat16"),
    "phased wide": (["precision={name: phased, parameters: bf16, phases: [{compute: fp32}]}"], "bfloat16", "float32"),
}
TWO = {
    "fsdp": ["sharding=fsdp"],
    "zero 2": ["sharding=zero", "sharding.stage=2"],
}
SHARED = ["launch.threads=1", "train.max_steps=6", "train.val_every=2"]
AT_3 = "checkpoints/step-00000003"


def is_refused(precision: str, sharding: str) -> bool:
    """float16 needs a processor of its own under zero, and phases another engine (test_grid.py); autocast has no fp32 (test_phased.py)."""
    return (sharding == "zero 2" and precision in ("fp16", "phased")) or (sharding != "fsdp" and precision == "phased wide")


def test_weights_gradients_and_state_have_the_dtypes_that_are_documented(workspace: Path) -> None:
    """docs/precision.md has this table. Compute is what a linear layer gives."""
    shardings = {"single": ["sharding=single"], **TWO}
    cells = {f"{p}, {s}": (p, s) for p in PRECISIONS for s in shardings if not is_refused(p, s)}
    found: dict[str, dict[str, list[str]]] = {}
    for ranks in (1, 2):
        asked = {name: [*PRECISIONS[p][0], *shardings[s]] for name, (p, s) in cells.items() if (s == "single") == (ranks == 1)}
        found |= json.loads(run_ranks("precision_dtypes.py", ranks, asked).stdout.splitlines()[-1])
    assert found.keys() == cells.keys()
    for name, (precision, sharding) in cells.items():
        _, kept, computed = PRECISIONS[precision]
        expected = {"weights": [kept], "gradients": [kept], "state": [kept], "compute": [computed]}
        if sharding == "zero 2":
            expected["forward"] = [computed]
        assert found[name] == expected, name


SHARDINGS = {
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "kept": ["sharding={name: fsdp, reshard_after_forward: false}", "activation={name: auto, budget: 400KiB}"],
    "tensor": ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"],
    "host": ["sharding=fsdp", "offload.optimizer=cpu"],
}


@pytest.mark.parametrize(("one", "other", "shardings"), [("bf16", "fp32", tuple(SHARDINGS)), ("fp32", "bf16", ("fsdp", "kept"))])
def test_each_phase_is_the_run_in_its_dtype_from_the_same_weights(
    workspace: Path, one: str, other: str, shardings: tuple[str, ...]
) -> None:
    phased = f"precision={{name: phased, phases: [{{from_step: 0, compute: {one}}}, {{from_step: 3, compute: {other}}}]}}"
    runs = {}
    for name in shardings:
        for run, precision, more in (
            ("phased", phased, ["train.save_every=1"]),
            ("first", f"precision={one}", []),
            ("second", f"precision={other}", [f"resume={name}-phased/{AT_3}"]),
            ("resumed", phased, [f"resume={name}-phased/checkpoints/step-00000002"]),
            ("later", phased, [f"resume={name}-phased/checkpoints/step-00000004"]),
        ):
            runs[f"{name}-{run}"] = [*SHARDINGS[name], *SHARED, precision, *more, f"train.run_dir={name}-{run}"]
    run_ranks("train_in_turn.py", 2, list(runs.values()))
    for name in shardings:
        for key in ("loss", "grad_norm"):
            straight = column(f"{name}-phased", key)
            assert straight[:3] == column(f"{name}-first", key)[:3] != column(f"{name}-second", key), (name, key)
            assert straight[3:] == column(f"{name}-second", key) != column(f"{name}-first", key)[3:], (name, key)
            assert straight[2:] == column(f"{name}-resumed", key) and straight[4:] == column(f"{name}-later", key), (name, key)
        at_2, at_4, at_6 = (row for row in column(f"{name}-phased", "val_loss") if row is not None)
        assert at_2 == column(f"{name}-first", "val_loss")[1], "validation has the dtype of the step before it"
        assert [at_4, at_6] == [row for row in column(f"{name}-second", "val_loss") if row is not None]


def test_an_evaluation_in_the_compute_dtype_is_what_divided_parameters_have_anyway(workspace: Path) -> None:
    """With full_eval one rank validates as fsdp and zero do with it or without."""
    words = ["launch.threads=1", "train.max_steps=1", "train.val_every=1"]
    full = "precision={name: bf16, full_eval: true}"
    fw("train", "tiny.yaml", full, *words, "optimizer.lr=1e-9", "train.run_dir=one").ok()
    runs = {f"{s}-{p}": [*TWO[s], precision] for s in TWO for p, precision in (("full", full), ("plain", "precision=bf16"))}
    run_ranks("train_in_turn.py", 2, [[*cell, *words, "optimizer.lr=1e-9", f"train.run_dir={name}"] for name, cell in runs.items()])
    for sharding in TWO:
        assert column(f"{sharding}-full", "val_loss") == column(f"{sharding}-plain", "val_loss"), sharding
        assert column(f"{sharding}-full", "val_loss") == pytest.approx(column("one", "val_loss"), rel=1e-6), sharding


def test_replicas_stay_alike_after_evaluations_on_converted_weights(workspace: Path) -> None:
    """DDP's hooks are on what autograd keeps of the parameters themselves: they must stay the same."""
    words = ["sharding=ddp", "launch.threads=1", "train.max_steps=4", "train.val_every=1", "train.save_every=4"]
    runs = {name: f"precision={{name: bf16, full_eval: {name}}}" for name in ("true", "false")}
    run_ranks("train_in_turn.py", 2, [[precision, *words, f"train.run_dir={name}"] for name, precision in runs.items()])
    for key in ("loss", "grad_norm"):
        assert column("true", key) == column("false", key)
    assert all(a != b for a, b in zip(column("true", "val_loss"), column("false", "val_loss"), strict=True))


def test_another_dtype_of_a_parameters_data_loses_its_hooks() -> None:
    """Why converted tensors stand in the parameters' places, which keep their data."""
    parameter = torch.nn.Parameter(torch.ones(2))
    seen = []
    accumulator = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: seen.append(1))
    parameter.sum().backward()
    kept = parameter.data
    parameter.data = kept.bfloat16()
    parameter.data = kept
    parameter.sum().backward()
    assert seen == [1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([PHASED, "sharding=zero"], "DeepSpeed's engine keeps its weights for forward in one dtype"),
        ([f"precision={{name: phased, parameters: bf16, {PHASES}}}", "sharding=ddp"], "nothing torch's autocast does"),
        (["precision={name: fp8, emulate: false}", "sharding=fsdp"], "need a GPU of compute capability 8.9 or later"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(workspace: Path, words: list[str], said: str) -> None:
    done = fw("train", "tiny.yaml", *words, "launch.devices=2", "train.max_steps=1")
    assert done.code == 2 and done.err.count(said) == 1, done.err
