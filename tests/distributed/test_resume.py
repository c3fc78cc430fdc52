"""Stopping and going on changes nothing: bit for bit on the same ranks, to 1e-5 on others."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import column, fw, metrics, start

ONE = ()
TWO = ("sharding=fsdp", "launch.devices=2")
SAVE = "train.save_every=20"


def weights(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def state(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["one rank", "fsdp on two"])
def test_straight_equals_stopped_and_resumed(workspace, ranks):
    fw("train", "tiny.yaml", *ranks, SAVE, "train.max_steps=40", "train.run_dir=straight").ok()
    fw("train", "tiny.yaml", *ranks, SAVE, "train.max_steps=20", "train.run_dir=halves").ok()
    done = fw("train", "tiny.yaml", *ranks, SAVE, "train.max_steps=40", "train.run_dir=halves", "resume=auto").ok()
    assert "resuming from" in done.err and "at step 20" in done.err
    for name in ("step", "tokens", "loss", "grad_norm", "lr"):
        assert column("straight", name) == column("halves", name), name
    expected, found = weights("straight", 40), weights("halves", 40)
    assert set(expected) == set(found) and all(expected[name].equal(found[name]) for name in expected)
    expected, found = state("straight", 40), state("halves", 40)
    assert set(expected) == set(found) and all(expected[name].equal(found[name]) for name in expected)
    assert Path("halves/checkpoints/latest").resolve().name == "step-00000040"


@pytest.mark.parametrize(
    ("before", "after"),
    [(TWO, ONE), (ONE, TWO), (TWO, ("sharding=ddp", "launch.devices=2"))],
    ids=["fsdp 2 to 1", "1 to fsdp 2", "fsdp 2 to ddp 2"],
)
def test_another_number_of_ranks_goes_on_with_the_same_losses(workspace, before, after):
    fw("train", "tiny.yaml", *before, SAVE, "train.run_dir=run").ok()
    shutil.copytree("run", "same", symlinks=True)
    fw("train", "tiny.yaml", *before, "train.max_steps=40", "train.run_dir=same", "resume=auto").ok()
    fw("train", "tiny.yaml", *after, "train.max_steps=40", "train.run_dir=other", "resume=run").ok()
    expected, found = column("same", "loss")[20:], column("other", "loss")
    assert len(expected) == len(found) == 20
    assert max(abs(a - b) / a for a, b in zip(expected, found, strict=True)) <= 1e-5


def test_a_resumed_run_with_another_batch_size_sees_the_next_samples(workspace):
    fw("train", "tiny.yaml", "train.max_steps=4", "train.save_every=4").ok()
    fw("train", "tiny.yaml", "train.max_steps=6", "train.save_every=6", "train.global_batch_size=4", "resume=auto").ok()
    state = json.loads(Path("run/checkpoints/latest/trainer.json").read_text())
    assert state["loader"]["samples_seen"] == 4 * 8 + 2 * 4 and state["tokens"] == (4 * 8 + 2 * 4) * 64


def test_resuming_keeps_the_loss_scale_and_skips_are_shown(workspace):
    fp16 = (
        "precision=fp16",
        "precision.initial_scale=1e36",
        "train.sequence_length=16",
        "train.global_batch_size=2",
        SAVE,
    )
    done = fw("train", "tiny.yaml", *fp16, "train.max_steps=20").ok()
    assert "gradient not finite, step skipped" in done.err
    scale = json.loads(Path("run/checkpoints/latest/trainer.json").read_text())["scalars"]["loss_scale"]
    assert scale < 1e36
    fw("train", "tiny.yaml", *fp16, "train.max_steps=21", "resume=auto").ok()
    assert json.loads(Path("run/checkpoints/latest/trainer.json").read_text())["scalars"]["loss_scale"] <= scale


def test_auto_starts_afresh_where_there_is_nothing_and_keeps_what_there_is(workspace):
    fw("train", "tiny.yaml", "train.max_steps=2", "resume=auto", "train.save_every=2").ok()
    done = fw("train", "tiny.yaml", "train.max_steps=2", "resume=auto").ok()
    assert "nothing to do" in done.err and len(metrics("run")) == 2
    done = fw("train", "tiny.yaml", "train.max_steps=3").ok()
    assert "held an earlier run, which is now run.1" in done.err
    assert len(metrics("run.1")) == 2 and len(metrics("run")) == 3


def started(*words: str, **more: Any) -> subprocess.Popen[str]:
    """A run that has done its first step."""
    endless = ("train", "tiny.yaml", "train.max_steps=100000", "train.save_every=100000")
    process = start(*endless, *words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **more)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            return process
    raise AssertionError(f"ended with {process.wait()} before its first step")


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["one rank", "fsdp on two"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGUSR1", "ctrl-c"]
)
def test_a_signal_saves_and_ends_cleanly(workspace, ranks, number, code):
    process = started(*ranks)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    rows = metrics("run")
    steps = int(rows[-1]["step"])
    assert f"stopped after step {steps}; go on with resume=auto" in err
    assert Path("run/checkpoints/latest").resolve().name == f"step-{steps:08d}"
    assert not list(Path("run/checkpoints").glob("*.tmp"))
    done = fw("train", "tiny.yaml", *ranks, f"train.max_steps={steps + 2}", "resume=auto", SAVE).ok()
    assert f"at step {steps}" in done.err and len(metrics("run")) == steps + 2


def test_ranks_whose_launcher_is_killed_save_and_end(workspace):
    process = started(*TWO)
    process.kill()
    _, err = process.communicate(timeout=120)  # until the last rank has closed its end
    assert "go on with resume=auto" in err
    assert fw("train", "tiny.yaml", "train.max_steps=1", "resume=auto").ok().err.count("nothing to do") == 1


def test_a_signal_with_saving_switched_off_says_so(workspace):
    process = started("train.save_every=0")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "nothing was saved, since train.save_every is 0" in err
    assert not Path("run/checkpoints").exists()


def small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(workspace):
    done = fw("train", "tiny.yaml", "train.max_steps=3", "train.save_every=2", preexec_fn=small_files_only)
    assert done.code == 1 and "warning: checkpoint run/checkpoints/step-00000002 not written: File too large" in done.err
    assert "training finished, but its last checkpoint was not written" in done.err
    assert len(metrics("run")) == 3 and Path("run/summary.json").is_file()
    assert not list(Path("run/checkpoints").iterdir()), "no half-written checkpoint may keep its space"


def test_a_stop_whose_save_fails_does_not_claim_to_have_saved(workspace):
    process = started(preexec_fn=small_files_only)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "training stopped, but its last checkpoint was not written" in err
    assert "go on with resume=auto" not in err


def test_resume_refuses_damage_other_data_and_what_is_no_checkpoint(workspace):
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2").ok()
    Path("other.txt").write_text(Path("corpus.txt").read_text().replace("model", "engine"))
    done = fw("train", "tiny.yaml", "resume=run", "data.files=other.txt", "train.run_dir=new")
    assert done.code == 2 and "was trained on other data" in done.err
    done = fw("train", "tiny.yaml", "resume=run", "train.seed=9", "train.run_dir=new")
    assert done.code == 2 and "was trained with train.seed=0, the config says 9, which would change the order of the data" in done.err
    for override, says in (
        ("optimizer=sgd", "was trained with optimizer=adamw, the config says sgd"),
        ("precision=bf16_true", "was trained with parameter dtype=float32, the config says bfloat16"),
        ("train.sequence_length=32", "was trained with train.sequence_length=64, the config says 32"),
    ):
        done = fw("train", "tiny.yaml", "resume=run", override, "train.run_dir=new")
        assert done.code == 2 and says in done.err
    done = fw("train", "tiny.yaml", "resume=run/checkpoints/step-00000002/nowhere")
    assert done.code == 2 and "is no checkpoint: no such directory" in done.err
    done = fw("train", "tiny.yaml", "resume=.")
    assert done.code == 2 and "is no checkpoint: it has no manifest.json" in done.err
    file = Path("run/checkpoints/step-00000002/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    done = fw("train", "tiny.yaml", "resume=auto")
    assert done.code == 2 and "model.safetensors has other bytes than were written" in done.err and "none of the checkpoints" in done.err
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


def test_a_model_of_another_shape_is_refused_with_the_differences(workspace):
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2").ok()
    done = fw("train", "tiny.yaml", "resume=run", "model.num_hidden_layers=3", "train.run_dir=new", "train.max_steps=4")
    assert done.code != 0 and "missing: model.layers.2." in done.err
    done = fw("train", "tiny.yaml", "resume=run", "model.intermediate_size=96", "train.run_dir=new", "train.max_steps=4")
    assert done.code != 0 and "is [128, 64] in the files and [96, 64] in the model" in done.err
