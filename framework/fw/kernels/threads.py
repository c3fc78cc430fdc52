"""Torch's own threads, where kernels of fw's own do the work.

After each piece of work that torch divides, its threads look out for the next one for milliseconds, and take processors from who has some.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class _Before(threading.local):
    threads: int | None = None


_before = _Before()


def of_torch() -> int:
    """How many threads torch has in this thread of the program, but for ``alone``."""
    return torch.get_num_threads() if _before.threads is None else _before.threads


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch divides its work with: loaded already, and not loaded again."""
    for name in ("libgomp.so.1", "libomp.so", "libiomp5.so"):
        place = Path(torch.__file__).parent / "lib" / name
        if place.exists():
            return ctypes.CDLL(str(place))
    return None


@contextmanager
def alone(several: int = 1) -> Iterator[None]:
    """What torch does on the CPU in this thread of the program, it does by itself, or in ``several`` threads; others go on as they did.

    ``torch.set_num_threads`` would do it for all of them, and begins a pool of threads anew each time.
    """
    openmp = _openmp()
    if openmp is None:
        yield
        return
    threads, outer = openmp.omp_get_max_threads(), _before.threads
    _before.threads = of_torch()
    openmp.omp_set_num_threads(several)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)
        _before.threads = outer
