"""Who takes part in a run, and who may write its directory."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from conftest import fw
from fw.config import load
from fw.errors import RunError, UserError
from fw.launching.outcome import RESUME_FROM
from fw.recipe import World, resolve
from fw.training import same_run
from fw.training.attempts import Attempts
from fw.training.same_run import (
    begun_by_this_torchrun,
    check_same_data,
    check_same_kernels,
    check_same_run,
    held,
    held_by,
    note_starter,
    older_checkpoints,
)
from thread_ranks import on_ranks


def test_a_directory_belongs_to_one_run_at_a_time(workspace):
    with held(Path("run")):
        with pytest.raises(UserError, match=f"another run is writing run \\(process {os.getpid()} on "), held(Path("run")):
            pass
        done = fw("train", "tiny.yaml", "train.max_steps=1")
        assert done.code == 2 and "another run is writing run" in done.err and not Path("run").exists()
        done = fw("train", "tiny.yaml", "train.max_steps=1", "sharding=ddp", "launch.devices=2")
        assert done.code == 2 and "another run is writing run" in done.err and not Path("run").exists()
        with held(Path("other")):
            pass
    assert not list(Path().glob(".*.lock"))
    fw("train", "tiny.yaml", "train.max_steps=1").ok()


@pytest.mark.parametrize("ranks", [(), ("sharding=ddp", "launch.devices=2")])
def test_what_cannot_begin_leaves_an_earlier_run_where_it_is(workspace, small_model, ranks):
    """Weights that are not there, or not all, are missed before anything is made."""
    shutil.copytree(small_model("llama"), "base")
    begins = ("train.max_steps=1", "model={name: auto, path: base}", "data.tokenizer=base", *ranks)
    fw("train", "tiny.yaml", *begins).ok()
    weights = load_file("base/model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "down_proj" not in name}, "base/model.safetensors")
    done = fw("train", "tiny.yaml", *begins)
    assert done.code == 2 and "down_proj" in done.err and done.err.count("fw: error") == 1
    Path("base/model.safetensors").unlink()
    done = fw("train", "tiny.yaml", *begins)
    assert done.code == 2 and "base holds no weights" in done.err
    assert Path("run/summary.json").is_file() and not Path("run.1").exists()


def test_ranks_of_two_runs_or_two_configs_do_not_train_together(workspace, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    one = resolve(load("tiny.yaml", ["sharding=ddp", "launch.devices=2"]), World())
    seed = resolve(load("tiny.yaml", ["sharding=ddp", "launch.devices=2", "train.seed=1", "optimizer.lr=0.1"]), World())
    threads = resolve(load("tiny.yaml", ["sharding=ddp", "launch.devices=2", "launch.threads=1"]), World())
    assert on_ranks(2, lambda own: check_same_run(one if own.rank else threads, own)) == [None, None]
    for found in on_ranks(2, lambda own: check_same_run(seed if own.rank else one, own)):
        assert isinstance(found, RunError) and "rank 1 has another optimizer, train than rank 0" in str(found)


def test_ranks_with_and_without_kernels_do_not_train_together(monkeypatch):
    """Their updates would differ, and replicas drift apart."""
    here = threading.local()
    monkeypatch.setattr(same_run, "missing", lambda: here.why)

    def checked(*reasons):
        def check(own):
            here.why = reasons[own.rank]
            check_same_kernels(own)

        return on_ranks(len(reasons), check)

    assert checked(None, None) == checked("no compiler", "CXX=x: there is no such command") == [None, None]
    for found in checked(None, None, "no compiler"):
        assert (
            isinstance(found, RunError) and "rank 2 on " in str(found) and "no CPU kernels of fw's (no compiler), and others" in str(found)
        )
    monkeypatch.setenv("FW_TRAINING_KERNELS", "off")
    assert checked(None, "no compiler") == [None, None]


def test_torchrun_goes_on_with_its_own_run_only(tmp_path, monkeypatch):
    assert not begun_by_this_torchrun(tmp_path)
    note_starter(tmp_path)
    assert begun_by_this_torchrun(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not begun_by_this_torchrun(tmp_path)


def test_checkpoints_of_one_place_are_one_runs_at_a_time(workspace):
    kept = Path("kept")
    recipe = resolve(load("tiny.yaml", ["checkpoint.to=kept", "train.run_dir=one"]), World())
    with held_by(recipe):
        done = fw("train", "tiny.yaml", "train.max_steps=1", "checkpoint.to=kept", "train.run_dir=other")
        assert done.code == 2 and "checkpoint.to: another run is writing" in done.err and not Path("other").exists()
    assert not kept.exists() and not list(Path().glob(".*.lock"))


def test_what_was_there_before_this_torchrun_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert older_checkpoints(tmp_path) is None
    note_starter(tmp_path, ("b", "a"))
    assert older_checkpoints(tmp_path) == {"a", "b"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    assert older_checkpoints(tmp_path) is None


def test_ranks_with_other_data_do_not_train_together():
    def corpus(fingerprint, train):
        return SimpleNamespace(fingerprint=fingerprint, train=range(train), val=range(2))

    assert on_ranks(2, lambda own: check_same_data(corpus("a", 9), own)) == [None, None]
    for other in (corpus("a", 8), corpus("b", 9)):
        for found in on_ranks(2, lambda own, other=other: check_same_data(other if own.rank else corpus("a", 9), own)):
            assert isinstance(found, RunError) and "has other data than rank 0" in str(found)


def test_a_run_that_waited_goes_on_from_what_the_other_has_saved_meanwhile(workspace):
    """`resume=auto` was looked up before the directory was this run's."""
    words = ["launch.devices=1", "train.save_every=2", "train.max_steps=2"]
    fw("train", "tiny.yaml", *words).ok()
    recipe = resolve(load("tiny.yaml", [*words, "resume=auto"]), World())
    start = recipe.checkpoint.open(recipe.checkpoints / "step-00000002")
    fw("train", "tiny.yaml", *words[:2], "train.max_steps=4", "resume=auto").ok()
    with Attempts(recipe, start, lambda text: None, {}) as attempts:
        assert attempts.prepare(0)[RESUME_FROM].endswith("step-00000004")
