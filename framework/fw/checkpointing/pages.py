"""Pages of files that are mapped, and were read."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def leave(tensor: Tensor) -> None:
    """A tensor in a mapped file is not needed any more, so that its pages need not stay: the process would count them as its own until the
    file is closed. They are read again if somebody wants them after all. No effect but on Linux.

    Args:
        tensor: whose memory is a file's, and which nobody has written to.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    size = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
