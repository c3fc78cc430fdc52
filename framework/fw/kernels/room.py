"""Memory for what stays: in large pages, where the system has them, so that reading all of it again and again looks up few of them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNED = 64


class Room:
    """Gives tensors one behind another. What they take is free when all that were given of a chunk are gone.

    Args:
        chunk_bytes: taken from the system at once.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: Tensor | None = None
        self._left = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """On the host, with anything in it."""
        count = 1
        for size in shape:
            count *= size
        if not count:
            return torch.empty(shape, dtype=dtype)
        room = -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        if self._chunk is None or self._left < room:
            self._chunk = _mapped(max(room, self._chunk_bytes))
            self._left = self._chunk.numel()
        begin = self._chunk.numel() - self._left
        self._left -= room
        return self._chunk[begin : begin + count * dtype.itemsize].view(dtype).view(*shape)


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
