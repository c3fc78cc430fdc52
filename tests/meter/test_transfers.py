"""What offload moves in a step, and how fast."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from conftest import fw
from fw.meter.operators import StepTrace
from fw.meter.step_time import StepTime
from fw.meter.transfers import FROM_DISK, TO_DISK, Transfer, disk_rates, disk_transfer, heard, transfer
from fw.planning import tell_time

SECOND = 1_000_000_000


def test_pieces_that_overlap_count_their_time_once() -> None:
    found = transfer(TO_DISK, [((0, 2 * SECOND), 100), ((SECOND, 3 * SECOND), 50), ((5 * SECOND, 6 * SECOND), 6)], most=78.0)
    assert found == Transfer(TO_DISK, 156, 4.0, 78.0) and found.rate == 39.0


def test_what_threads_tell_of_is_heard_while_somebody_listens(tmp_path: Path) -> None:
    def move(nbytes: int) -> None:
        with disk_transfer(FROM_DISK, nbytes, tmp_path):
            pass

    move(1)
    with heard() as found:
        threads = [threading.Thread(target=move, args=(nbytes,)) for nbytes in (10, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with disk_transfer(TO_DISK, 4000, tmp_path):
            pass
    move(1)
    assert [(each.way, each.nbytes) for each in found] == [(TO_DISK, 4000), (FROM_DISK, 210)]
    assert all(each.most > 0 for each in found) and list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_tried_nothing_is_said(tmp_path: Path) -> None:
    assert disk_rates(tmp_path / "missing") == {TO_DISK: 0.0, FROM_DISK: 0.0}


def test_a_trace_has_the_bytes_of_state_and_activations_on_disk(workspace: Path) -> None:
    """AdamW reads and writes 8 bytes for each parameter; of activations what is written comes back."""
    overrides = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8"]
    both = [*overrides, "offload={optimizer: nvme, path: disk}"]
    done = fw("profile", "tiny.yaml", *both, "--steps", "1", "--timed", "1", "--trace", "trace", "--json").ok()
    state = json.loads(done.out)["per_rank"][0]["components_max"]["parameters_bytes"] * 2
    assert _moved("trace") == {TO_DISK: state, FROM_DISK: state}

    both = [*overrides, "offload={activations: nvme, activations_above: 1KiB, path: disk}", "--html", "page.html"]
    done = fw("profile", "tiny.yaml", *both, "--steps", "1", "--timed", "1", "--trace", "other").ok()
    moved = _moved("other")
    assert moved[TO_DISK] == moved[FROM_DISK] > 0
    assert f"\n  {TO_DISK}: " in done.out and "B/s of " in done.out and "Transfers in the step" in Path("page.html").read_text()


def test_copies_of_a_gpu_are_told_in_words() -> None:
    moved = [Transfer("to the GPU", 3 << 30, 0.1, 5e10), Transfer("to the host", 1 << 20, 0.5)]
    trace = StepTrace(1.0, [], 0.0, 0.0, [], moved)
    assert StepTrace.from_json(json.loads(json.dumps(trace.as_json()))) == trace
    assert tell_time.transfers(trace) == [
        ["to the GPU", "3 GiB", "32.2 GB/s", " of 50 GB/s measured"],
        ["to the host", "1 MiB", "2.1 MB/s", ""],
    ]


def _moved(directory: str) -> dict[str, int]:
    trace = StepTime.from_json(json.loads(Path(directory, "step-time.json").read_text())).trace
    assert trace is not None
    assert all(each.seconds > 0 and each.most > 0 for each in trace.transfers)
    return {each.way: each.nbytes for each in trace.transfers}
