"""Compiling and loading what is written in C++. A library is made once for a source, a compiler and a processor, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
"""Nothing that lets sums be taken in another order than written."""


class NotCompiled(Exception):
    """There is no compiler, or it refuses; why, as a sentence."""


@functools.cache
def library(name: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The functions of ``name.cpp``. The OpenMP they use is the one torch has loaded, so that their threads are the same.

    Args:
        flags: further ones for the compiler.

    Raises:
        NotCompiled: with the reason.
    """
    if os.environ.get("FW_KERNELS") == "off":
        raise NotCompiled("FW_KERNELS=off")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NotCompiled("no C++ compiler is there: install g++, or set CXX")
    source = (_HERE / f"{name}.cpp").read_bytes()
    headers = b"".join(file.read_bytes() for file in sorted(_HERE.glob("*.h")))
    every = [*_FLAGS, *flags]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    told = b"\0".join([source, headers, version, " ".join(every).encode(), _processor()])
    made = _kept_in() / f"{name}-{hashlib.sha256(told).hexdigest()[:16]}.so"
    if not made.exists():
        _compile(compiler, every, _HERE / f"{name}.cpp", made)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise NotCompiled(f"{made} cannot be loaded: {error}") from None


def _compile(compiler: str, flags: Sequence[str], source: Path, made: Path) -> None:
    """Under another name first: who compiles at the same time finds it whole or not at all."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as place:
            out = Path(place) / made.name
            found = subprocess.run([compiler, *flags, str(source), "-o", str(out)], capture_output=True, text=True, check=False)
            if found.returncode:
                raise NotCompiled(f"{compiler} refuses {source.name}: {(found.stderr.strip() or 'it says nothing').splitlines()[0]}")
            out.replace(made)
    except OSError as error:
        raise NotCompiled(f"{made.parent} cannot be written: {error.strerror}") from None


def _kept_in() -> Path:
    given = os.environ.get("FW_CACHE")
    return (Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fw") / "kernels"


def _processor() -> bytes:
    """What it can do: a home directory may be seen by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).encode()
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}".encode()
