"""DeepSpeed's operators for the host, compiled before ranks start: a step of its own, with progress and an end.

DeepSpeed compiles them when they are first used, in every rank at once, without a word.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fw.api import RunError, UserError
from fw_plugins.sharding.zero import engine, locks
from fw_plugins.sharding.zero.waiting import Waiting

_STAMP = "fw-built"
_OURS = "fw-lock"
_LAST_LINES = 12
_OF_FILES = ("pin_memory", "async_io")
_HEADER = "#include <libaio.h>\nint main() { return 0; }\n"


def prepare(names: Sequence[str], say: Callable[[str], None], device_type: str) -> None:
    """Compile what is not compiled yet.

    Args:
        names: of DeepSpeed's operators.

    Raises:
        UserError: the host lacks a compiler or headers.
        RunError: the compiler failed; with its last lines.
    """
    for name in names:
        if name in _OF_FILES:
            _check_libaio(name)  # DeepSpeed looks for it, with the compiler, whenever it loads what it has built
        directory = build_directory(name)
        with Waiting(say) as waiting, _alone(directory, waiting):
            locks.clear(directory, say, waiting)
            if (directory / _STAMP).is_file() and (directory / _STAMP).read_text() == _versions():
                continue
            _check_compiler(name)
            _compile(name, directory, device_type, say, waiting)
            (directory / _STAMP).write_text(_versions())


def build_directory(name: str) -> Path:
    """Where torch builds an extension (TORCH_EXTENSIONS_DIR, or the user's cache)."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _versions() -> str:
    """What a build depends on. Another environment has other paths, and ninja would build anew: in every rank, in silence."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "deepspeed")]
    return "\n".join([*packages, sys.version, sys.prefix, ""])


@contextmanager
def _alone(directory: Path, waiting: Waiting) -> Iterator[None]:
    """One process builds at a time, also where hosts share the directory: torch's own lock cannot be told from a stale one there."""
    with (directory / _OURS).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting(f"another run builds in {directory}; waiting for it")
                time.sleep(0.5)
        yield


def _check_compiler(name: str) -> None:
    engine.find_ninja()
    try:
        subprocess.run([_compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError(
            f"offload: DeepSpeed's {name} has to be compiled, and {_compiler()} is not here; install it (Debian: g++)"
        ) from None


def _check_libaio(name: str) -> None:
    _check_compiler(name)
    with tempfile.TemporaryDirectory() as scratch:
        flags = [*os.environ.get("CFLAGS", "").split(), *os.environ.get("LDFLAGS", "").split()]
        command = [_compiler(), "-x", "c++", "-", *flags, "-laio", "-o", f"{scratch}/out"]
        if subprocess.run(command, input=_HEADER, capture_output=True, text=True).returncode:
            raise UserError(
                "offload: nvme needs DeepSpeed's async_io, which cannot be compiled without libaio and its header;"
                " install them (Debian: libaio-dev), or offload to cpu"
            )


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _compile(name: str, directory: Path, device_type: str, say: Callable[[str], None], waiting: Waiting) -> None:
    """Let DeepSpeed build in a process of its own, which is all that can be interrupted."""
    again = any(directory.glob("*.so"))
    if (problem := _try(name, directory, device_type, waiting)) and again and "ImportError" in problem:
        say(f"{directory} holds a build that cannot be loaded; building it anew")
        for part in directory.iterdir():
            if part.name != _OURS:
                part.unlink()
        problem = _try(name, directory, device_type, waiting)
    if problem:
        raise RunError(f"DeepSpeed's {name} could not be compiled; the last lines were:\n{problem}")


def _try(name: str, directory: Path, device_type: str, waiting: Waiting) -> str:
    """The last lines of a build that failed; empty for one that did not."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "fw_plugins.sharding.zero.build", name, device_type]
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while child.poll() is None:
                waiting(f"compiling DeepSpeed's {name} in {directory}")
                try:
                    child.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        if child.returncode == 0:
            return ""
        output.seek(0)
        return "\n".join(output.read().splitlines()[-_LAST_LINES:]) or f"exit code {child.returncode}"
