"""Locks of killed and of living builds, and what a build that fails says. Nothing of DeepSpeed is compiled here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

import pytest

pytest.importorskip("deepspeed")

from fw.errors import RunError, UserError
from fw_plugins.sharding.zero import locks, ops

HOLD = """
import os, sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.read()
baton.release() if sys.argv[2] == "release" else os._exit(1)
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    made = ops.build_directory("cpu_adam")
    assert made.is_relative_to(tmp_path)
    return made


@pytest.fixture
def build(monkeypatch):
    """Stands for DeepSpeed's build: notes that it was called."""
    calls = []
    monkeypatch.setattr(ops, "_try", lambda name, *rest: calls.append(name) or "")
    return calls


def hold(directory, end):
    """A process that holds torch's own lock until its input closes."""
    command = [sys.executable, "-c", HOLD, str(directory / locks.LOCK), end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_stale_lock_is_named_and_removed(directory, build):
    hold(directory, "die").communicate("")
    assert (directory / locks.LOCK).exists(), "a build that dies leaves it"
    said = []
    ops.prepare(["cpu_adam"], said.append, "cpu")
    assert not (directory / locks.LOCK).exists() and build == ["cpu_adam"]
    assert said == [f"{directory / locks.LOCK} was left by a build that was killed; removed"]


def test_the_lock_of_a_living_build_is_waited_for(directory, build):
    process = hold(directory, "release")
    said, told = [], threading.Event()

    def say(text):
        said.append(text)
        told.set()

    thread = threading.Thread(target=ops.prepare, args=(["cpu_adam"], say, "cpu"))
    thread.start()
    assert told.wait(60)
    assert said == [f"process {process.pid} builds in {directory}; waiting for it"] and not build
    assert locks.holder(directory / locks.LOCK) == process.pid
    process.communicate("")
    thread.join(60)
    assert not thread.is_alive() and build == ["cpu_adam"] and len(said) == 1


def test_two_runs_build_one_after_the_other(directory, build):
    """The second finds what the first has built."""
    code = f"import fcntl, sys; f = open({str(directory / ops._OURS)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
    command = [sys.executable, "-c", code + "; sys.stdin.read()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    said, told = [], threading.Event()
    thread = threading.Thread(target=ops.prepare, args=(["cpu_adam"], lambda text: (said.append(text), told.set()), "cpu"))
    thread.start()
    assert told.wait(60) and "another run builds" in said[0]
    (directory / ops._STAMP).write_text(ops._versions())
    process.communicate("")
    thread.join(60)
    assert not thread.is_alive() and not build


def test_what_is_built_is_not_built_again(directory, build):
    ops.prepare(["cpu_adam"], print, "cpu")
    ops.prepare(["cpu_adam"], print, "cpu")
    assert build == ["cpu_adam"]
    (directory / ops._STAMP).write_text("another torch\n")
    ops.prepare(["cpu_adam"], print, "cpu")
    assert build == ["cpu_adam"] * 2


def test_a_build_that_cannot_be_loaded_is_thrown_away(directory, monkeypatch):
    """A killed linker leaves a part of a library, which ninja takes for whole."""
    (directory / "cpu_adam.so").write_bytes(b"\x7fELF half")
    monkeypatch.setattr(ops, "_try", lambda *args: "ImportError: file too short" if (directory / "cpu_adam.so").exists() else "")
    said = []
    ops.prepare(["cpu_adam"], said.append, "cpu")
    assert said == [f"{directory} holds a build that cannot be loaded; building it anew"]


def test_a_failing_compiler_is_quoted(directory, tmp_path, monkeypatch):
    """A real child process, with a compiler that refuses."""
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version|-dump*) exec g++ "$@";; esac\necho "no such thing as a header" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RunError, match=r"cpu_adam could not be compiled; the last lines were:(.|\n)*(header|Error building)"):
        ops.prepare(["cpu_adam"], print, "cpu")
    assert not (directory / ops._STAMP).exists()


def test_a_missing_compiler_is_the_users_to_install(directory, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no-such-compiler is not here; install it"):
        ops.prepare(["cpu_adam"], print, "cpu")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_libaio_that_has_gone_since_its_user_was_built_is_the_users_to_install(directory, build, monkeypatch):
    (ops.build_directory("async_io") / "fw-built").write_text(ops._versions())
    monkeypatch.setenv("LDFLAGS", "-lthat-is-nowhere")
    with pytest.raises(UserError, match=r"libaio and its header; install them \(Debian: libaio-dev\), or offload to cpu"):
        ops.prepare(["async_io"], print, "cpu")
    assert not build
