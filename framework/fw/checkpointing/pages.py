"""Pages of memory: of files that are mapped, and of what was allocated and is free again."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

from torch import Tensor


def trim() -> None:
    """What was allocated and freed goes back to the system, as far as the C library can; else it keeps much of it, for later. No effect
    but with glibc."""
    if (give_back := getattr(_libc(), "malloc_trim", None)) is not None:
        give_back(ctypes.c_size_t(0))


def coming(tensor: Tensor) -> None:
    """A tensor in a mapped file is needed soon: have what is not in memory read meanwhile. No effect but on Linux."""
    if sys.platform != "linux":
        return
    begin, length = _pages(tensor)
    there = (ctypes.c_ubyte * 1)()
    for page in (begin, begin + (length - 1) // mmap.PAGESIZE * mmap.PAGESIZE):  # the system is asked for all only where one is missing
        if _libc().mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), there) == 0 and not there[0] & 1:
            _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_WILLNEED)
            return


def _pages(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the pages that it lies on, and how many there are to its end."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, tensor.data_ptr() + tensor.nbytes - begin


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def leave(tensor: Tensor) -> None:
    """A tensor in a mapped file is not needed any more, so that its pages need not stay: the process would count them as its own until the
    file is closed. They are read again if somebody wants them after all. No effect but on Linux.

    Args:
        tensor: whose memory is a file's, and which nobody has written to; of some columns, what lies between them goes, too.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.numel():
        return
    size = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // size) * size
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.data_ptr() + (last + 1) * tensor.element_size()) // size * size
    if end > begin:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
