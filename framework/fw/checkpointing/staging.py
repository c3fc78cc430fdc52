"""A snapshot copied to host memory, so that it can be written while training goes on."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fw.checkpointing.pieces import Layout, kept
from fw.kinds.checkpoint import Kept, Part, Piece, Ranks, Region, Snapshot

_ALIGNED = 64
PINNED_BYTES = 64 << 20
"""Of each of two buffers that a GPU copies to."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not among Python's constants yet."""


class Stage:
    """Host memory for one snapshot, kept for the next ones.

    A rank copies what it is asked to give of each tensor and nothing else: where ranks keep the same, one of them does. Tensors of a GPU
    come through two page-locked buffers of 64 MiB, one being filled while the other is emptied; the rest is ordinary memory, since
    page-locking as much as a model needs takes long and leaves none to others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._layout, self._ranks = Layout(ranks), ranks
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned: list[Tensor] = []
        self._growing: threading.Thread | None = None

    def reserve(self, tensors: Mapping[str, Mapping[str, Part]]) -> int:
        """Begin to get the memory that these tensors will take, so that the first copy need not wait for it. Collective.

        Returns:
            bytes.
        """
        _, total = self._plan(tensors)
        self._growing = threading.Thread(target=self._grow, args=(total,), name="staging memory", daemon=True)
        self._growing.start()
        return total

    def plan(self, tensors: Mapping[str, Mapping[str, Part]]) -> Copying:
        """What :meth:`Copying.run` will copy, in another thread if need be. Collective."""
        if self._growing is not None:
            self._growing.join()
            self._growing = None
        offers, total = self._plan(tensors)
        self._grow(total)
        return Copying(offers, self._memory, self._pinned)

    def _plan(self, tensors: Mapping[str, Mapping[str, Part]]) -> tuple[list[_Offer], int]:
        """What this rank gives of each tensor, and the bytes of it all."""
        originals: dict[int, Tensor | Kept] = {}
        for group in tensors.values():
            originals |= {id(part.tensor): part.tensor for part in group.values()}
        all_kept = [kept(tensor) for tensor in originals.values()]
        self._layout.update(all_kept)
        offers, total = [], 0
        for number, (original, tensor) in enumerate(zip(originals.values(), all_kept, strict=True)):
            gives = self._ranks.rank in self._layout.givers(number, writer=None)
            piece = tensor.piece() if gives else None
            offers.append(_Offer(original, tensor, piece))
            if piece is not None:
                total += staged_bytes(_elements(piece.where) * tensor.dtype.itemsize)
        return offers, total

    def _grow(self, total: int) -> None:
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before the larger one is asked for
            self._memory = _host_memory(total)


class Copying:
    """The copy of one snapshot's tensors. They must not change from when it is planned until it has run."""

    def __init__(self, offers: Sequence[_Offer], memory: Tensor, pinned: list[Tensor]) -> None:
        self._offers, self._memory, self._pinned = offers, memory, pinned
        # Kernels that are under way on a GPU may still write what is to be copied.
        self._written = torch.cuda.Event() if torch.cuda.is_initialized() else None
        self._device: int | None = None  # of this thread; another one's is the first GPU unless it says so
        if self._written is not None:
            self._written.record()
            self._device = torch.cuda.current_device()

    def run(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with copies, which later changes do not reach; valid until the next plan is made."""
        staged: dict[int, Kept] = {}
        offset = 0
        with self._stream():
            for offer in self._offers:
                piece = offer.piece
                if piece is not None:
                    values = piece.read()
                    size = values.numel() * values.dtype.itemsize
                    target = self._memory[offset : offset + size].view(values.dtype).view(values.shape)
                    offset += -(-size // _ALIGNED) * _ALIGNED
                    self._transfer(values, target)
                    piece = Piece(piece.where, functools.partial(_same, target))
                staged[id(offer.original)] = _Staged(offer.tensor, piece)
        tensors = {
            stem: {name: Part(staged[id(part.tensor)], part.of) for name, part in group.items()} for stem, group in snapshot.tensors.items()
        }
        return dataclasses.replace(snapshot, tensors=tensors)

    def _stream(self) -> AbstractContextManager[object]:
        """A stream of its own on a GPU, so that copies run beside the next step's kernels and not after them."""
        if self._written is None:
            return nullcontext()
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._written)
        return torch.cuda.stream(stream)

    def _transfer(self, values: Tensor, target: Tensor) -> None:
        if values.device.type != "cuda":
            target.copy_(values)
            return
        if not self._pinned:
            self._pinned += [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        source, host = values.contiguous().reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8)
        waiting: list[tuple[torch.cuda.Event, Tensor, Tensor]] = []
        for number, start in enumerate(range(0, source.numel(), PINNED_BYTES)):
            if len(waiting) == 2:
                _empty(*waiting.pop(0))
            block = source[start : start + PINNED_BYTES]
            pinned = self._pinned[number % 2][: block.numel()]
            pinned.copy_(block, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(values.device))
            waiting.append((event, pinned, host[start : start + block.numel()]))
        for entry in waiting:
            _empty(*entry)


@dataclasses.dataclass(frozen=True)
class _Offer:
    """A tensor, and what this rank gives of it."""

    original: Tensor | Kept
    tensor: Kept
    piece: Piece | None


class _Staged(Kept):
    def __init__(self, tensor: Kept, piece: Piece | None) -> None:
        self.shape, self.dtype, self._piece = tensor.shape, tensor.dtype, piece

    def piece(self) -> Piece | None:
        """What was copied."""
        return self._piece


def _same(values: Tensor) -> Tensor:
    return values


def staged_bytes(size: int) -> int:
    """What a piece of ``size`` bytes takes of a stage."""
    return -(-size // _ALIGNED) * _ALIGNED


def _elements(where: Region) -> int:
    return math.prod(one.stop - one.start for one in ([where] if isinstance(where, slice) else where))


def _empty(event: torch.cuda.Event, pinned: Tensor, host: Tensor) -> None:
    event.synchronize()
    host.copy_(pinned)


def _host_memory(size: int) -> Tensor:
    """Bytes of host memory that are there already: in large pages where the kernel has them, and all touched."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    address = ctypes.c_void_p(found.data_ptr())
    if ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
        found.zero_()
    return found
