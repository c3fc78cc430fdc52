"""glibc's allocator, told that what a training step frees the next step wants again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have blocks of all sizes come from the heap, and keep up to 2 GiB of free heap instead of giving it back after each step.

    By default glibc maps and unmaps every large tensor, and the kernel zeroes its pages anew each time: a step of the quickstart takes
    8 % longer so (172 and 159 ms). With blocks above 32 MiB mapped still, which is the largest threshold that there is, the gradient of
    an embedding of 125 MiB alone took 117 ms of 1,900. Affects tensors on the CPU only.

    Returns:
        whether the C library took the settings; False where it is not glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


def give_back_freed_memory() -> None:
    """Return what is free to the kernel, once: between phases of a run, whose tensors do not fit each other's gaps."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
