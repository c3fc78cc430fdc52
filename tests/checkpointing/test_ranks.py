"""A save ends on every rank, with one sentence that names the cause, whatever happens to one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

SIZE = 3


def run(directory: Path, scenario: str) -> list[list[object] | None]:
    script = Path(__file__).parent / "saving_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(SIZE), str(directory / "store"), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        for rank in range(SIZE)
    ]
    found: list[list[object] | None] = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert out or rank.returncode == 3, err
        found.append(json.loads(out) if out else None)
    return found


def test_what_one_rank_cannot_do_all_hear_and_the_next_save_goes_on(tmp_path):
    said = run(tmp_path, "fails")
    assert all(rank == [[0, 10, 20], "step 3 not written: rank 1: /some/file: Permission denied", [0, 10, 20]] for rank in said)


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("fails_while_others_wait_for_it", "step 3 not written: rank 1: MemoryError: no memory for the tensor"),
        ("hangs", "step 3 not written: rank 1 has made no progress for 4 s (writing optimizer-00002)"),
    ],
)
def test_a_rank_that_keeps_others_waiting_is_named_within_the_time_out(tmp_path, scenario, sentence):
    assert all(rank == [[0, 10, 20], sentence] for rank in run(tmp_path, scenario))


def test_a_rank_that_dies_ends_the_save_of_the_others(tmp_path):
    first, died, last = run(tmp_path, "dies")
    assert died is None and all("step 3 not written: a rank was lost or did not answer" in str(rank[1]) for rank in (first, last))
