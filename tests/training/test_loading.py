"""Processes that read ahead change nothing but when batches are read, and leave stops to the run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from conftest import column, fw, start
from fw.config import LoaderSection
from fw.kinds.data import IGNORED
from fw.training.loading import loader
from fw.training.order import RankedBatches

AHEAD = ["loader.workers=2", "loader.prefetch=3"]


class Numbers:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((3,), index), "labels": torch.full((3,), index)}


@pytest.mark.parametrize("settings", [LoaderSection(), LoaderSection(workers=2, prefetch=1), LoaderSection(workers=1, persistent=False)])
def test_batches_come_in_order(settings):
    batches = loader(Numbers(), RankedBatches(7, 2, rank=1, ranks=2), settings, torch.device("cpu"))
    for _ in range(2):
        assert [batch["labels"][:, 0].tolist() for batch in batches] == [[2, 3], [6, IGNORED]]


@pytest.mark.parametrize("division", [[], ["sharding=fsdp", "launch.devices=2"]], ids=["one rank", "fsdp"])
def test_a_run_reads_the_same_and_resumes_where_it_was(workspace, division):
    words = ["train", "tiny.yaml", "train.max_steps=6", "train.save_every=3", "train.val_every=3", *division]
    fw(*words, "train.run_dir=here").ok()
    fw(*words, *AHEAD, "train.run_dir=ahead").ok()
    fw(*words, *AHEAD, "train.run_dir=again", "resume=ahead/checkpoints/step-00000003").ok()
    for key in ("loss", "val_loss"):
        assert column("ahead", key) == column("here", key) and column("again", key) == column("here", key)[3:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_all_processes_at_once_saves(workspace, number):
    """As a batch system or a terminal sends it: to every process of the group, workers included."""
    endless = ["train.max_steps=100000", "train.save_every=100000"]
    process = start("train", "tiny.yaml", *AHEAD, *endless, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stderr is not None
    assert any(line.startswith("step ") for line in process.stderr)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)  # until the last worker has closed its end
    assert process.returncode == (75 if number == signal.SIGTERM else 130), err
    assert "go on with resume=auto" in err and "Traceback" not in err
    assert len(list(Path("run/checkpoints").glob("step-*"))) == 1
