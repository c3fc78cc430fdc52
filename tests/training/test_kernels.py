"""Training by kernels of fw's own, as the command line has it: the default on a CPU, turned off, and where nothing can compile them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from conftest import column, environment, fw
from fw.config import load
from fw.kernels.of_cpu import missing
from fw.kernels.switches import turned_off
from fw.launching import cores
from fw.planning.host_speed import threads_of
from fw.recipe import World, resolve
from fw.training import inputs, rank


def trained(name: str, **variables: str) -> str:
    """What it said."""
    words = ["tiny.yaml", "train.max_steps=3", "precision=bf16", f"train.run_dir={name}"]
    return fw("train", *words, env={**environment(), **variables}).ok().err


@pytest.mark.skipif(missing() is not None, reason="no C++ compiler")
def test_who_cannot_compile_is_told_and_trains_by_torch(workspace: Path) -> None:
    ours = trained("ours")
    assert "CPU kernels are not compiled" not in ours
    assert "CPU kernels are not compiled" not in trained("off", FW_TRAINING_KERNELS="off")
    assert "training takes torch's operators: CXX=no-such-compiler: there is no such command" in trained("none", CXX="no-such-compiler")
    assert "training takes torch's operators: false refuses " in trained("refuses", CXX="false", FW_CACHE=str(workspace / "cache"))
    assert column("none", "loss") == column("refuses", "loss") == column("off", "loss") != column("ours", "loss")
    assert column("ours", "loss") == pytest.approx(column("off", "loss"), rel=2e-3)


def test_ranks_that_fw_starts_tell_it_once(workspace: Path) -> None:
    words = ["tiny.yaml", "train.max_steps=1", "sharding=ddp", "launch.devices=2", "train.run_dir=none"]
    said = fw("train", *words, env={**environment(), "CXX": "no-such-compiler"}).ok().err
    assert said.count("training takes torch's operators: CXX=no-such-compiler") == 1


def test_a_word_that_is_neither_on_nor_off_is_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fw("train", "tiny.yaml", env={**environment(), "FW_TRAINING_KERNELS": "of"})
    assert done.code == 2 and "FW_TRAINING_KERNELS=of: this is neither on nor off" in done.err
    for word, off in (("off", True), ("OFF", True), ("0", True), ("no", True), ("", False), ("1", False), ("On", False)):
        monkeypatch.setenv("FW_KERNELS", word)
        assert turned_off("FW_KERNELS") == off


def test_the_first_rank_of_each_host_tells_what_its_own_compiler_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inputs, "missing", lambda: "no C++ compiler is there")
    inputs.note_kernels(World(4, 0, 0, 2, True), torch.device("cpu"))
    inputs.note_kernels(World(4, 2, 0, 2, True), torch.device("cpu"))
    inputs.note_kernels(World(4, 2, 0, 2, True), torch.device("cuda"))
    first, other = capsys.readouterr().err.splitlines()
    assert first == "fw: CPU kernels are not compiled, and training takes torch's operators: no C++ compiler is there"
    assert other.startswith(f"fw: on {socket.gethostname()} CPU kernels are not compiled")


@pytest.mark.parametrize(
    "precision, computes",
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("{name: phased, phases: [{from_step: 0, compute: bf16}, {from_step: 5, compute: fp32}]}", "bfloat16"),
        ("fp32", None),
    ],
)
def test_who_has_no_products_in_16_bits_is_told(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str, computes: str | None
) -> None:
    recipe = resolve(load("tiny.yaml", [f"precision={precision}"]))
    for has, device in ((False, "cpu"), (True, "cpu"), (False, "cuda")):
        monkeypatch.setattr(inputs, "multiplies", lambda dtype, has=has: has)
        inputs.note(recipe, torch.device(device))
        said = f"fw: this processor has no products in {computes}: they take several times as long as those of precision=fp32"
        assert (said in capsys.readouterr().err) == (computes is not None and not has and device == "cpu")


def test_a_rank_alone_takes_no_more_threads_than_it_has_time_for(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "quota", lambda: 1.5)
    torch.set_num_threads(2)
    try:
        recipe = resolve(load("tiny.yaml"))
        assert threads_of(recipe) == 1
        rank._share_processors(recipe, World())
        assert torch.get_num_threads() == 1 and "torch's threads: 1 instead of 2" in capsys.readouterr().err
        rank._share_processors(resolve(load("tiny.yaml", ["launch.threads=2"])), World())
        assert torch.get_num_threads() == 2 and not capsys.readouterr().err
    finally:
        torch.set_num_threads(before)
