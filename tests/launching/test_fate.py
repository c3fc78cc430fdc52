"""Who failed first, from what ranks leave behind."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

import pytest
import torch

from fw.launching.fate import fates
from fw.launching.outcome import OUTCOME_DIR, Failure
from fw.launching.peers import peer_error
from fw.launching.stacks import main_stack, waits_for_others


def leave(directory, rank: int, time: float, of_peer: bool, code: int = 1) -> None:
    failure = Failure(time, code, f"sentence {rank}", "trace", of_peer)
    (directory / f"rank-{rank}.failure").write_text(json.dumps(asdict(failure)))


def dump(tmp_path, where) -> str:
    """A real dump of this process while another thread runs too."""
    done, started = threading.Event(), threading.Event()

    def other_thread() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=other_thread)
    thread.start()
    started.wait()
    file = tmp_path / "stack"
    with file.open("w") as open_file:
        open_file.write(f"main thread {threading.main_thread().ident:#x}\n")
        open_file.flush()
        where(lambda: faulthandler.dump_traceback(open_file, all_threads=True))
    done.set()
    thread.join()
    return file.read_text()


def test_the_main_threads_stack_is_found_in_a_dump(tmp_path):
    def somewhere(go):
        go()

    frames = main_stack(dump(tmp_path, somewhere))
    assert "<lambda>" in frames[0] and frames[1].endswith("in somewhere")
    assert not any("other_thread" in frame for frame in frames)
    assert main_stack("") == [] and not waits_for_others(frames)
    assert waits_for_others(['  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce'])


def test_the_cause_comes_before_what_it_caused(tmp_path):
    leave(tmp_path, 0, 1.0, of_peer=True)
    leave(tmp_path, 1, 3.0, of_peer=False)
    leave(tmp_path, 2, 2.0, of_peer=False, code=2)
    found = fates(tmp_path, None, {0: 1, 1: 1, 2: 2}, {3: ""})
    assert [fate.rank for fate in found] == [2, 1, 0, 3] and found[0].is_user_error and found[3].was_ended


def test_a_signal_without_a_word_is_a_cause_and_says_its_last_line(tmp_path):
    leave(tmp_path, 0, 1.0, of_peer=True)
    (tmp_path / "rank-1.log").write_text("hello\nterminate called\n")
    found = fates(tmp_path, tmp_path, {0: 1, 1: -6}, {})
    assert (found[0].rank, found[0].sentence, found[0].detail) == (1, "was killed by SIGABRT", "terminate called\n")
    (tmp_path / "rank-1.log").write_text("[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)\n")
    leave(tmp_path, 0, 1.0, of_peer=False)
    assert fates(tmp_path, tmp_path, {0: 1, 1: -6}, {})[0].rank == 0, "NCCL's watchdog ends ranks that wait for another one"


def test_where_native_code_ended_a_rank_is_said(tmp_path):
    """A process that ends so in earnest, as a rank of fw's launcher."""
    program = "from fw.launching import stacks\nimport os\n\ndef somewhere():\n    os.abort()\n\nstacks.answer_when_asked()\nsomewhere()\n"
    file = tmp_path / "ends.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], env={**os.environ, "RANK": "1", OUTCOME_DIR: str(tmp_path)}, capture_output=True)
    assert done.returncode == -6
    (tmp_path / "rank-1.log").write_text("terminate called\n")
    fate = fates(tmp_path, tmp_path, {1: -6}, {})[0]
    assert fate.sentence == f'was killed by SIGABRT in "{file}", line 5 in somewhere'
    assert fate.detail.splitlines()[:2] == ["terminate called", "stack of rank 1, innermost frame first:"]
    assert [line.split(" in ")[-1] for line in fate.detail.splitlines()[2:4]] == ["somewhere", "<module>"]


def test_only_who_is_outside_a_collective_hangs(tmp_path):
    leave(tmp_path, 0, 1.0, of_peer=True)
    head = "main thread 0x10\nCurrent thread 0x0000000000000010 (most recent call first):\n"
    waiting = head + '  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n  File "y.py", line 2 in step\n'
    stuck = head + '  File "y.py", line 3 in stuck\n'
    found = fates(tmp_path, None, {0: 1}, {1: waiting, 2: stuck})
    assert [fate.rank for fate in found] == [2, 0, 1] and found[0].sentence == 'hangs in "y.py", line 3 in stuck'
    leave(tmp_path, 0, 1.0, of_peer=False)
    assert fates(tmp_path, None, {0: 1}, {2: stuck})[0].rank == 0, "a rank in the midst of its step when another failed does not hang"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("[/a/b/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "was lost"),
        (RuntimeError("[/a/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"), "launch.timeout=4 s"),
        (torch.distributed.DistStoreError("Timed out after 11 seconds waiting for clients. 1/2 clients joined."), "launch.timeout=4 s"),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp:1, remote process exited: ncclRemoteError"), "was lost"),
    ],
)
def test_what_libraries_say_of_lost_peers_is_translated(error, says):
    told = peer_error(error, 4)
    assert told is not None and says in str(told) and "/gloo/" not in str(told)


def test_other_errors_are_left_as_they_are():
    assert peer_error(RuntimeError("shape mismatch: timed out"), 4) is None and peer_error(ValueError("gloo"), 4) is None


def test_another_threads_end_is_not_the_main_threads(tmp_path):
    program = "from fw.launching import stacks\nimport ctypes, threading\n\ndef waits():\n    thread.join()\n\n"
    program += "stacks.answer_when_asked()\nthread = threading.Thread(target=ctypes.string_at, args=(0,))\nthread.start()\nwaits()\n"
    file = tmp_path / "ends.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], env={**os.environ, "RANK": "1", OUTCOME_DIR: str(tmp_path)}, capture_output=True)
    assert done.returncode == -11
    fate = fates(tmp_path, None, {1: -11}, {})[0]
    assert fate.sentence.startswith("was killed by SIGSEGV in another thread, while the main thread was in ")
    assert str(file) in fate.detail
