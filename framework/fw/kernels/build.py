"""Compiling and loading what is written in C++: one library, made once for its sources, a compiler and a processor, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from fw.caches import cache_dir
from fw.kernels.threads import of_torch

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""Nothing that lets sums be taken in another order than written."""


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
    """All functions, which share their threads: as many as torch has now.

    Args:
        flags: further ones for the compiler.

    Raises:
        NotCompiled: with the reason.
    """
    if os.environ.get("FW_KERNELS") == "off":
        raise NotCompiled("FW_KERNELS=off")
    by = shlex.split(compiler())
    sources = sorted(_HERE.glob("*.cpp"))
    text = b"".join(file.read_bytes() for file in [*sources, *sorted(_HERE.glob("*.h"))])
    every = [*_FLAGS, *flags]
    version = subprocess.run([*by, "--version"], capture_output=True, check=False).stdout
    told = b"\0".join([text, version, " ".join(every).encode(), _processor()])
    made = cache_dir() / "kernels" / f"fw-{hashlib.sha256(told).hexdigest()[:16]}.so"
    if not made.exists():
        _compile(by, every, sources, made)
    try:
        found = ctypes.CDLL(str(made))
    except OSError as error:
        raise NotCompiled(f"{made} cannot be loaded: {error}") from None
    found.fw_threads(ctypes.c_long(of_torch()))
    return found


def set_threads(several: int) -> None:
    """Of torch on the CPU, and of kernels where they are loaded."""
    torch.set_num_threads(several)
    if library.cache_info().currsize:
        library().fw_threads(ctypes.c_long(several))


@contextmanager
def with_threads(several: int) -> Iterator[None]:
    """Meanwhile kernels have so many threads, in all of the process."""
    try:
        made = library()
    except NotCompiled:
        yield
        return
    before = made.fw_thread_count()
    made.fw_threads(ctypes.c_long(several))
    try:
        yield
    finally:
        made.fw_threads(ctypes.c_long(before))


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], made: Path) -> None:
    """Under another name first: who compiles at the same time finds it whole or not at all."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as place:
            out = Path(place) / made.name
            objects = [Path(place) / f"{source.stem}.o" for source in sources]
            commands = [[*compiler, *flags, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True)]
            with ThreadPoolExecutor() as at_once:
                list(at_once.map(_run, commands))
            _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(out)])
            out.replace(made)
    except OSError as error:
        raise NotCompiled(f"{made.parent} cannot be written: {error.strerror}") from None


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
