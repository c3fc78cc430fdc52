"""Ranks of one host that add up and gather tensors on the CPU, through memory that all of them map."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from fw.kernels.build import library
from fw.kernels.calls import Kernel

ROOM = 128 << 10
"""Bytes of each rank's that are exchanged at once."""
_ADD_UP = Kernel("fw_add_up", [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long])
_GATHER = Kernel("fw_gather", [ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long])
_IN_KERNELS = (torch.float32, torch.bfloat16)


def available() -> bool:
    """Whether the kernels can be had on this machine."""
    return _ADD_UP.available


def memory_bytes(ranks: int) -> int:
    """Of the memory in which so many meet."""
    return int(_function("fw_meeting_bytes", ctypes.c_long, ctypes.c_long, ctypes.c_long)(ranks, ROOM))


class Meeting:
    """A rank among others, all of which make the same calls in the same order.

    Args:
        memory: of all of them, :func:`memory_bytes` of zeros at first.
    """

    repeatable = True

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._memory = rank, ranks, memory
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        made = _function("fw_meeting", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_long)
        self._meeting: int = made(begin, rank, ranks, ROOM)
        # Not at the end of the process: a thread may be about to call :meth:`end`.
        weakref.finalize(self, _function("fw_meeting_left", None, ctypes.c_void_p), self._meeting).atexit = False

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, added in fp32 and in the order of the ranks; x itself, where it is contiguous."""
        if x.dtype not in _IN_KERNELS:
            return self.add_up(x.float()).to(x.dtype)
        x = x.contiguous()
        _ADD_UP(self._meeting, x.data_ptr(), x.numel(), x.dtype == torch.float32)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """On the first rank all ranks' x, ``[ranks, …]``, which are of one shape; x itself on others."""
        x = x.contiguous()
        if self.rank:
            _GATHER(self._meeting, x.data_ptr(), x.data_ptr(), x.nbytes)
            return x
        found = torch.empty((self.ranks, *x.shape), dtype=x.dtype)
        _GATHER(self._meeting, x.data_ptr(), found.data_ptr(), x.nbytes)
        return found

    def end(self) -> None:
        """Nobody waits any more, here and on other ranks, and what is computed means nothing. Any thread may say so."""
        _function("fw_meeting_ends", None, ctypes.c_void_p)(self._meeting)

    @property
    def ended(self) -> bool:
        """Whether somebody has said so."""
        return bool(_function("fw_meeting_ended", ctypes.c_long, ctypes.c_void_p)(self._meeting))


def _function(name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    found = getattr(library(), name)
    found.restype, found.argtypes = result, arguments
    return found
