"""Processes that read ahead change nothing but when batches are read, and leave stops to the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import column, fw, start
from fw.config import LoaderSection
from fw.kinds.data import IGNORED
from fw.training import loading
from fw.training.batches import Source, ValidationPlans
from fw.training.loading import loader
from fw.training.micro_batches import Limit, Padding

AHEAD = ["loader.workers=2", "loader.prefetch=3"]


class Numbers:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((3,), index), "labels": torch.full((3,), index)}


class Words:
    """Sample i has i + 1 positions."""

    lengths = np.arange(1, 8)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((index + 1,), index), "labels": torch.arange(index + 1)}


SETTINGS = [LoaderSection(), LoaderSection(workers=2, prefetch=1), LoaderSection(workers=1, persistent=False)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_batches_come_in_order(settings):
    source = Source(Numbers(), np.full(7, 3), None)
    for rank, expected in ((0, [[0, 1], [6]]), (1, [[2, 3], [4, 5]])):
        batches = loader(source, ValidationPlans(source, Limit(rows=2), rank, 2), settings, torch.device("cpu"))
        for _ in range(2):
            assert [micro["labels"][:, 2].tolist() for batch in batches for micro in batch.micro_batches] == expected


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_are_padded_to_the_longest_of_their_micro_batch(settings):
    """Rows are a multiple of 3 and at most 7 long. Nine tokens hold a row of 7 or 6, or three of 3; three replicas, two turns each."""
    source = Source(Words(), Words.lengths, Padding(3, 7))
    found, empty = [], 0
    for rank in range(3):
        batches = list(loader(source, ValidationPlans(source, Limit(tokens=9), rank, 3), settings, torch.device("cpu")))
        assert len(batches) == 2
        for batch in batches:
            (micro,) = batch.micro_batches
            ids, labels, segments = micro["input_ids"], micro["labels"], micro["segments"]
            assert ids.shape == labels.shape == segments.shape and ids.numel() <= 9
            assert ids.shape[1] == 3 * -(-int(segments.sum(1).max()) // 3) or ids.shape[1] in (7, 3)
            empty += int(segments.sum() == 0)
            for row in range(len(ids)):
                length = int(segments[row].sum())
                found += [length] * (length > 0)
                assert segments[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
                assert labels[row].tolist() == [*range(length), *[IGNORED] * (ids.shape[1] - length)]
                assert ids[row].tolist() == [length - 1] * length + [0] * (ids.shape[1] - length)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7] and empty == 0


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


def test_other_processes_of_the_program_stay():
    """At its end workers are killed, which would be waited for in vain; others are its own affair."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    loading._end_workers()
    assert process.is_alive()
    process.kill()
    process.join()
