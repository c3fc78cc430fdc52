"""Compiling and loading what is written in C++: one library, made once for its sources, a compiler and a processor, and kept."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fw.caches import cache_dir
from fw.kernels.cores import cores, openmp_binds
from fw.kernels.switches import KERNELS, turned_off
from fw.kernels.threads import of_torch

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""Nothing that lets sums be taken in another order than written."""
_LINKED = ("-lstdc++",) if sys.platform == "linux" else ()
"""A driver for C, which CXX may name, compiles C++ as it should, and leaves its library out."""
_refused: dict[tuple[str, ...], str] = {}
"""Why, by what is asked for: a compiler that refuses is not asked again, for seconds each time."""


class NotCompiled(Exception):
    """There is no compiler, or it refuses; why, as a sentence."""


def compiler() -> str:
    """The command; ``CXX`` may name one with arguments, as in makefiles.

    Raises:
        NotCompiled: there is none.
    """
    found = os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise NotCompiled("no C++ compiler is there: install g++, or set CXX")
    try:
        command = shlex.split(found)[0]
    except ValueError as error:
        raise NotCompiled(f"CXX={found}: {error}") from None
    if shutil.which(command) is None:
        raise NotCompiled(f"CXX={found}: there is no such command")
    return found


@functools.cache
def library(*flags: str) -> ctypes.CDLL:
    """All functions, which share their threads: as many as torch has.

    Args:
        flags: further ones for the compiler.

    Raises:
        NotCompiled: with the reason.
    """
    if turned_off(KERNELS):
        raise NotCompiled("FW_KERNELS=off")
    asked = compiler(), *flags, str(cache_dir())
    if asked in _refused:
        raise NotCompiled(_refused[asked])
    try:
        found = _loaded(shlex.split(asked[0]), [*_FLAGS, *flags])
    except NotCompiled as why:
        _refused[asked] = str(why)
        raise
    if openmp_binds():
        numbers = sorted(cores())
        found.fw_cores((ctypes.c_int * len(numbers))(*numbers), ctypes.c_long(len(numbers)))
    _torch.threads = _torch.of_this_thread.number = of_torch()
    found.fw_threads(ctypes.c_long(_torch.threads))
    return found


def _loaded(by: Sequence[str], flags: Sequence[str]) -> ctypes.CDLL:
    sources = sorted(_HERE.glob("*.cpp"))
    text = b"".join(file.read_bytes() for file in [*sources, *sorted(_HERE.glob("*.h"))])
    version = subprocess.run([*by, "--version"], capture_output=True, check=False).stdout
    told = b"\0".join([text, version, " ".join([*flags, *_LINKED]).encode(), _processor()])
    made = cache_dir() / "kernels" / f"fw-{hashlib.sha256(told).hexdigest()[:16]}.so"
    if not made.exists():
        _compile(by, flags, sources, made)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise NotCompiled(f"{made} cannot be loaded: {error}") from None


class _Torch:
    """How many threads torch had when kernels were given as many: in all of the program, and where this thread of it last looked."""

    def __init__(self) -> None:
        self.threads = 0
        self.of_this_thread = threading.local()


_torch = _Torch()


def follow_torch() -> None:
    """Kernels that are loaded have as many threads as torch, where ``torch.set_num_threads`` has changed these."""
    now, mine = of_torch(), _torch.of_this_thread
    if now != getattr(mine, "number", _torch.threads) and library.cache_info().currsize:
        _torch.threads = now
        library().fw_threads(ctypes.c_long(now))
    mine.number = now


def set_threads(several: int) -> None:
    """Of torch on the CPU, and of kernels where they are loaded."""
    torch.set_num_threads(several)
    follow_torch()


@contextmanager
def with_threads(several: int) -> Iterator[None]:
    """Meanwhile kernels have so many threads, in all of the process."""
    try:
        made = library()
    except NotCompiled:
        yield
        return
    follow_torch()
    before = made.fw_thread_count()
    made.fw_threads(ctypes.c_long(several))
    try:
        yield
    finally:
        made.fw_threads(ctypes.c_long(before))


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], made: Path) -> None:
    """By one process at a time, for ranks begin together; under another name first, so that it is found whole or not at all."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with _alone(made.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=made.parent) as place:
            if made.exists():
                return
            out = Path(place) / made.name
            objects = [Path(place) / f"{source.stem}.o" for source in sources]
            commands = [[*compiler, *flags, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)]
            with ThreadPoolExecutor() as at_once:
                list(at_once.map(_run, commands))
            _run([*compiler, *flags, "-shared", *map(str, objects), *_LINKED, "-o", str(out)])
            with out.open("rb") as whole:
                os.fsync(whole.fileno())
            out.replace(made)
    except OSError as error:
        raise NotCompiled(f"{made.parent} cannot be written: {error.strerror}") from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Until the block ends, also by a kill; not where the file system has no locks: who compiles the same meanwhile only works in vain."""
    with path.open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        of = next((Path(word).name for word in command if word.endswith(".cpp")), "the objects")
        raise NotCompiled(f"{command[0]} refuses {of}: {(found.stderr.strip() or 'it says nothing').splitlines()[0]}")


def _processor() -> bytes:
    """What it can do: a home directory may be seen by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).encode()
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}".encode()
