"""What goes wrong on one rank: named first, restarted where asked for, and the losses of a run in which nothing went wrong."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Finished, column, environment, fw, start
from distributed.faulty import installed
from fw.cli import main
from fw.config import LaunchSection
from fw_plugins.launcher import agent
from fw_plugins.launcher.local import LocalLauncher

TWO = ("sharding=ddp", "launch.devices=2", "train.save_every=4", "train.max_steps=10")


@pytest.fixture
def faulty(workspace, tmp_path_factory):
    """Runs `fw train` with a fault, on two ranks."""
    env = installed(tmp_path_factory.mktemp("site"))

    def run(how: str, *words: str, before: tuple[str, ...] = (), **options: object):
        fault = [f"objective.{key}={value}" for key, value in {"how": how, **options}.items()]
        command = ("train", "tiny.yaml", "objective=faulty", *fault, *TWO, *words)
        if before:
            done = subprocess.run([sys.executable, "-m", *before, *command], env=env, capture_output=True, text=True, timeout=200)
            return Finished(done.returncode, done.stdout, done.stderr)
        return fw(*command, env=env)

    return run


def test_a_killed_rank_is_restarted_and_the_run_ends_with_the_same_losses(faulty):
    main(["train", "tiny.yaml", "train.max_steps=10", "train.run_dir=straight"])
    Path("run").mkdir()
    Path("run/metrics.csv").write_text("of an earlier run\n")
    # Once before there is a checkpoint, and once, in the sixth step after that start, when rows go beyond the last one.
    done = faulty("kill", "launch.max_restarts=2", "logger=[csv,tensorboard]", "objective.steps=[3,6]").ok()
    told = [line for line in done.err.splitlines() if line.startswith("fw: ") and "data:" not in line]
    assert told[0] == "fw: run held an earlier run, which is now run.1"
    for attempt, start_of_next in enumerate(("the beginning", "checkpoints/step-00000004")):
        failed, again = told[1 + 2 * attempt : 3 + 2 * attempt]
        assert failed.startswith("fw: warning: rank 1 was killed by SIGKILL") and f"run/logs/attempt-{attempt}/rank-1.log" in failed
        assert again.endswith(f"{start_of_next}: attempt {attempt + 2} of 3"), again
    assert column("run", "step") == list(range(1, 11))
    assert column("run", "loss") == pytest.approx(column("straight", "loss"), rel=1e-5)
    assert Path("run.1/metrics.csv").read_text() == "of an earlier run\n" and not Path("run.2").exists()
    assert {p.parent.name for p in Path("run/logs").glob("*/rank-*.log")} == {"attempt-0", "attempt-1", "attempt-2"}


def test_ranks_that_torchrun_starts_again_go_on_too(faulty, workspace):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "fw")
    done = faulty("kill", "objective.steps=[6]", before=torchrun).ok()
    assert "resuming from run/checkpoints/step-00000004 at step 4" in done.err.replace(f"{workspace}/", "")
    assert column("run", "step") == list(range(1, 11)) and not Path("run.1").exists()


def test_the_first_failure_is_told_before_those_it_caused_and_all_logs_are_kept(faulty):
    done = faulty("raise", "launch.max_restarts=1", "--debug")
    errors = [line for line in done.err.splitlines() if line.startswith(("fw: error", "fw: warning"))]
    assert done.code == 1 and len(errors) == 2
    message = "rank 1 failed: ArithmeticError: a gremlin (unexpected; --debug shows the traceback); its log: run/logs/attempt"
    assert errors[0].startswith(f"fw: warning: {message}-0/rank-1.log")
    assert errors[1].startswith(f"fw: error: {message}-1/rank-1.log") and errors[1].endswith("(1 other of this host ended after it)")
    assert done.err.count("Traceback (most recent call last)") == 2, "those of the two first failures only"
    assert "in fail" in done.err and "about to fail" not in done.out + done.err
    for attempt in ("0", "1"):
        assert "about to fail" in Path(f"run/logs/attempt-{attempt}/rank-1.log").read_text()
        rank0 = Path(f"run/logs/attempt-{attempt}/rank-0.log").read_text()
        assert "step 1/10" in rank0 and "the connection to another rank was lost" in rank0


def test_a_rank_that_ends_between_two_looks_is_told_too(capfd, monkeypatch):
    exit_code, looked = agent._exit_code, set()

    def late(pid: int) -> int | None:
        """As if a rank had always ended a moment after it was first looked at."""
        code = exit_code(pid)
        if code is None or pid in looked:
            return code
        looked.add(pid)
        return None

    monkeypatch.setattr(agent, "_exit_code", late)
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    code = LocalLauncher(LocalLauncher.Config()).launch(command, LaunchSection(max_restarts=1), lambda attempt: {})
    told = [line for line in capfd.readouterr().err.splitlines() if "rank 0 was killed by SIGKILL" in line]
    assert code == 1 and [line.partition(" rank")[0] for line in told] == ["fw: warning:", "fw: error:"]


def test_wrong_input_is_not_restarted(faulty):
    done = faulty("user", "launch.max_restarts=3")
    assert done.code == 2 and done.err.splitlines()[-1] == "fw: error: the input is no good"
    assert Path("failed").read_text() == "x" and "again" not in done.err


def test_a_rank_that_hangs_is_named_with_its_stack(faulty):
    # In a C call that holds the GIL: no Python code of that rank runs any more.
    done = faulty("sleep", "launch.timeout=4", "launch.max_restarts=1", steps="[3]").ok()
    lines = done.err.splitlines()
    start = lines.index("stack of rank 1, innermost frame first:")
    assert re.fullmatch(r'  File ".*faulty_objective.py", line \d+ in fail', lines[start + 1])
    assert any("loss_sum" in line for line in lines[start + 2 : start + 5])
    told = next(line for line in lines if line.startswith("fw: warning: rank 1 hangs in "))
    assert "faulty_objective.py" in told and lines.index(told) > start
    assert column("run", "step") == list(range(1, 11))
    assert "faulty_objective.py" in Path("run/logs/attempt-0/rank-1.log").read_text()


def test_a_rank_alone_on_its_host_ends_itself_when_it_hangs(faulty):
    # One rank: no other notices. It is restarted, finishes, and what it wrote is kept.
    done = faulty("lock", "launch.timeout=2", "launch.max_restarts=1", "launch.devices=1", "sharding=single", rank=0, steps="[3]").ok()
    assert "fw: warning: rank 0 hangs in " in done.err and "stack of rank 0" in done.err
    assert column("run", "step") == list(range(1, 11))


def test_a_stop_before_training_begins_is_no_failure(workspace):
    process = start("train", "tiny.yaml", *TWO, "train.max_steps=100000", "launch.max_restarts=2", stderr=subprocess.PIPE)
    while not list(Path("run/logs").glob("attempt-0/rank-1.log")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75 and "again" not in err, err


def test_ranks_that_do_not_find_the_same_checkpoint_refuse(workspace, tmp_path):
    fw("train", "tiny.yaml", "train.save_every=2", "train.max_steps=2").ok()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("corpus.txt", "tiny.yaml"):
        shutil.copy(name, other / name)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    shared = {**environment(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    processes = [
        start(
            "train", "tiny.yaml", *TWO, "resume=auto", cwd=place, stderr=subprocess.PIPE, env={**shared, "MASTER_PORT": port, "RANK": rank}
        )
        for rank, place in (("0", tmp_path), ("1", other))
    ]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1 and "no such directory; rank 0 has it: checkpoints must be where all hosts share them" in err


def test_rank_0_keeps_its_terminal_and_its_log(workspace):
    ours, theirs = pty.openpty()
    process_words = ("train", "tiny.yaml", *TWO)
    done = fw_on_terminal(process_words, theirs)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    assert done == 0 and b"10/10" in shown and b"\r" in shown, shown
    assert "10/10" in Path("run/logs/attempt-0/rank-0.log").read_text()


def fw_on_terminal(words: tuple[str, ...], terminal: int) -> int:
    return start(*words, stdout=terminal, stderr=terminal).wait(timeout=120)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
