"""Every optimizer under every way to divide parameters: the losses of one rank, before and after a checkpoint that others go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import column, fw
from distributed.ranks import run_ranks

OPTIMIZERS = ["adafactor", "adamw", "adamw_8bit", "adamw_bf16", "lamb", "lion", "lion_8bit", "muon", "sgd"]
BY_ROWS, WHOLE = ["adamw_8bit", "lion_8bit"], ["adafactor", "lamb", "muon"]
SHARDINGS = {
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "tensor": ["sharding=fsdp", "sharding.tensor=2", "train.micro_batch_size=4"],
    "host": ["sharding=fsdp", "offload.optimizer=cpu"],
    "disk": ["sharding=fsdp", "offload.optimizer=nvme", "offload.path=."],
}
SHARED = ["launch.threads=1", "train.max_steps=6"]
SAVED = "train.save_every=3"
AT_3 = "checkpoints/step-00000003"


def is_refused(optimizer: str, sharding: str) -> bool:
    return (optimizer in BY_ROWS and sharding == "tensor") or (optimizer in WHOLE and sharding in ("host", "disk"))


@pytest.mark.slow
def test_every_optimizer_is_the_same_however_parameters_are_divided(workspace: Path) -> None:
    allowed = [(o, s) for o in OPTIMIZERS for s in SHARDINGS if not is_refused(o, s) and (o in BY_ROWS or s in ("fsdp", "tensor", "disk"))]
    runs = {f"{o}-{s}": [f"optimizer={o}", *SHARDINGS[s], *SHARED, SAVED if s == "fsdp" else "train.save_every=0"] for o, s in allowed}
    again = {
        f"{o}-{s}-again": [f"optimizer={o}", *SHARDINGS[s], *SHARED, "train.save_every=0", f"resume={o}-one/{AT_3}"]
        for o, s in allowed
        if s in ("fsdp", "disk")
    }
    for optimizer in OPTIMIZERS:
        one = ["train.micro_batch_size=4", f"train.run_dir={optimizer}-one"]
        fw("train", "tiny.yaml", f"optimizer={optimizer}", *SHARED, SAVED, *one).ok()
    run_ranks("train_in_turn.py", 2, [[*words, f"train.run_dir={name}"] for name, words in {**runs, **again}.items()])
    for name in runs:
        optimizer = name.partition("-")[0]
        # Gradients that differ by rounding move a few codes and signs.
        close = {"adamw_8bit": 1e-4, "lion": 1e-4, "lion_8bit": 1e-3, "adamw_bf16": 1e-3, "muon": 1e-3}.get(optimizer, 1e-5)
        for key in ("loss", "grad_norm"):
            expected = column(f"{optimizer}-one", key)
            assert column(name, key) == pytest.approx(expected, rel=close), (name, key)
            if f"{name}-again" in again:
                assert column(f"{name}-again", key) == pytest.approx(expected[3:], rel=close), (name, key)
    for optimizer in OPTIMIZERS:  # back on one rank, from what two have saved
        resume = [f"resume={optimizer}-fsdp/{AT_3}", "train.save_every=0", f"train.run_dir={optimizer}-back", "train.micro_batch_size=4"]
        fw("train", "tiny.yaml", f"optimizer={optimizer}", *SHARED, *resume).ok()
        assert column(f"{optimizer}-back", "loss") == pytest.approx(column(f"{optimizer}-one", "loss")[3:], rel=1e-3)


def test_an_update_in_backward_is_the_same(workspace: Path) -> None:
    one = ["train.gradient_clip_norm=0", "launch.threads=1", "train.max_steps=4", "train.save_every=2"]
    optimizers = ["adamw", "adamw_8bit", "lion"]
    shardings = {"fsdp": ["sharding=fsdp"], "tensor": SHARDINGS["tensor"], "host": SHARDINGS["host"]}
    runs = {}
    for optimizer in optimizers:
        for sharding, words in shardings.items():
            if not is_refused(optimizer, sharding):
                words = [*words, f"optimizer={optimizer}", *one, "train.micro_batch_size=null"]
                runs[f"{optimizer}-{sharding}-after"] = words
                runs[f"{optimizer}-{sharding}-in"] = [*words, "optimizer.in_backward=true"]
                runs[f"{optimizer}-{sharding}-again"] = [
                    *words,
                    "optimizer.in_backward=true",
                    f"resume={optimizer}-{sharding}-after/checkpoints/step-00000002",
                ]
    run_ranks("train_in_turn.py", 2, [[*words, f"train.run_dir={name}"] for name, words in runs.items()])
    for name in runs:
        kind, _, way = name.rpartition("-")
        for key in ("loss", "grad_norm"):
            expected = column(f"{kind}-after", key)
            assert column(name, key) == pytest.approx(expected if way != "again" else expected[2:], rel=1e-12), (name, key)


@pytest.mark.parametrize("precision", ["{name: bf16, accumulate: bf16}", "{name: bf16_true, accumulate: fp32}"])
def test_gradients_of_a_dtype_of_their_own_are_the_same_where_divided(workspace: Path, precision: str) -> None:
    words = [f"precision={precision}", "launch.threads=1", "train.max_steps=3"]
    fw("train", "tiny.yaml", *words, "train.run_dir=one").ok()
    run_ranks("train_in_turn.py", 2, [[*SHARDINGS[s], *words, f"train.run_dir={s}"] for s in ("fsdp", "tensor")])
    for sharding in ("fsdp", "tensor"):
        assert column(sharding, "loss") == pytest.approx(column("one", "loss"), rel=2e-3), sharding


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.in_backward=true", "sharding=ddp"], "ddp averages gradients in buckets after they have come"),
        (["optimizer.in_backward=true", "sharding=zero"], "DeepSpeed updates after backward"),
        (["optimizer.in_backward=true", "sharding=fsdp", "train.micro_batch_size=4"], "the run clips by the norm of all gradients"),
        (["optimizer.in_backward=true", "sharding=fsdp", "train.gradient_clip_norm=0"], "the run accumulates gradients over micro-batches"),
        (["optimizer.in_backward=true", "sharding=fsdp", "train.on_nonfinite=skip"], "skip looks at all gradients before an update"),
        (
            ["optimizer=adamw_8bit", "sharding=fsdp", "sharding.tensor=2"],
            "sharding.tensor cuts rows of 64 into 2 pieces, and 8-bit state comes in",
        ),
        (["optimizer=lion_8bit", "sharding=zero"], "zero joins parameters into one flat tensor and cuts it between ranks"),
        (["optimizer=lamb", "sharding=zero"], "zero joins parameters into one flat tensor and cuts it between ranks"),
        (["optimizer=adafactor", "sharding=fsdp", "offload.optimizer=cpu"], "steps each rank's part of a parameter by itself"),
    ],
)
def test_what_an_optimizer_cannot_do_is_said(workspace: Path, words: list[str], said: str) -> None:
    done = fw("train", "tiny.yaml", *words, "launch.devices=2", "train.max_steps=1")
    assert done.code == 2 and done.err.count(said) == 1, done.err
