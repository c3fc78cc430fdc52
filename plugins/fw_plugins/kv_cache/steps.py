"""Where the sequences of a step are in a cache of blocks: for the kernels of the CPU, for those of GPUs, and for torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fw.api import Places, Stretch
from fw.api.kernels import gpu
from fw_plugins.kv_cache.blocks import BlockPool


@dataclass(frozen=True)
class ForKernel:
    """A step's sequences, each with so many tokens from a position on.

    Attributes:
        slots_T: where each token is kept.
        tables_BM: int32; blocks of each sequence.
    """

    slots_T: Tensor
    tables_BM: Tensor
    starts_B: Tensor
    lengths_B: Tensor

    @staticmethod
    def empty(sequences: int, blocks: int, tokens: int) -> ForKernel:
        """Of sequences with so many blocks at most, and so many tokens of the step's in all."""
        whole = partial(torch.empty, dtype=torch.int32)
        slots_T = torch.empty(tokens, dtype=torch.int64)
        return ForKernel(slots_T, whole((sequences, blocks)), whole(sequences), whole(sequences))

    @staticmethod
    def of(stretches: Sequence[Stretch], pool: BlockPool) -> ForKernel:
        blocks = max(pool.blocks_for(stretch.end) for stretch in stretches)
        return ForKernel.empty(len(stretches), blocks, sum(stretch.length for stretch in stretches)).filled(stretches, pool)

    def filled(self, stretches: Sequence[Stretch], pool: BlockPool) -> ForKernel:
        """With where these are now; behind a sequence's own blocks stands anything."""
        size = pool.size
        slots: list[int] = []
        tables_BM = self.tables_BM.numpy()
        for row, stretch in enumerate(stretches):
            table = pool.tables[stretch.sequence]
            slots += [table[at // size] * size + at % size for at in range(stretch.start, stretch.end)]
            count = pool.blocks_for(stretch.end)
            tables_BM[row, :count] = table[:count]
        self.slots_T.numpy()[:] = slots
        self.starts_B.numpy()[:] = [stretch.start for stretch in stretches]
        self.lengths_B.numpy()[:] = [stretch.length for stretch in stretches]
        return self


@dataclass(frozen=True)
class KernelPlaces(Places):
    """Of a step on the CPU."""

    step: ForKernel


_ALIGNED = 4
"""Words of 16 bytes: a kernel is compiled anew for what does not begin at a multiple of them."""


def _parts(words: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """So many words each."""
    aligned = words.split([-(-size // _ALIGNED) * _ALIGNED for size in sizes])
    return [part[:size] for part, size in zip(aligned, sizes, strict=True)]


def _words(sizes: Sequence[int]) -> int:
    """Of all parts."""
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class _Told:
    """What the host tells the GPU of a step's sequences, in one piece of page-locked memory.

    Args:
        sizes: of the parts, in words.
        shape: of the tables.
    """

    def __init__(self, sizes: Sequence[int], shape: tuple[int, int]) -> None:
        self.words = torch.zeros(_words(sizes), dtype=torch.int32, pin_memory=True)
        slots, tables, self.starts, self.begins, self.few, self.others = (part.numpy() for part in _parts(self.words, sizes))
        self.slots, self.tables = slots.view(np.int64), tables.reshape(shape)
        self.read = torch.cuda.Event() if self.words.is_pinned() else None
        """When a GPU has."""
        self._written: list[tuple[list[int], int] | None] = [None] * shape[0]
        """The table of each sequence, and up to which position it has been told."""

    def fill(self, stretches: Sequence[Stretch], pool: BlockPool, is_few: Any) -> None:
        """Rows of sequences that are not there become 0."""
        size, count = pool.size, len(stretches)
        slots: list[int] = []
        for row, stretch in enumerate(stretches):
            table = pool.tables[stretch.sequence]
            slots += [table[at // size] * size + at % size for at in range(stretch.start, stretch.end)]
            told = self._written[row]
            # Blocks of what was computed before stay where they are, unless the sequence begins anew, with another table.
            since = told[1] // size if told is not None and told[0] is table and told[1] <= stretch.start else 0
            upto = pool.blocks_for(stretch.end)
            self.tables[row, since:upto] = table[since:upto]
            self._written[row] = (table, stretch.end)
        self.slots[: len(slots)] = slots
        self.slots[len(slots) :] = -1
        self.starts[:count] = [stretch.start for stretch in stretches]
        lengths = np.array([*(stretch.length for stretch in stretches), *[-1] * (len(is_few) - count)])
        self.few[:] = np.where(is_few, lengths, 0)
        self.others[:] = np.where(is_few, 0, lengths)


class OnGPU:
    """A step's sequences, for the kernels of GPUs: those of few tokens, and the others.

    A GPU may not have read what it was last told when it is told of the next step: there are two of what the host writes, which is waited
    for where nobody has waited for the step of the one before.

    Args:
        lengths: tokens of each sequence; fewer sequences may be there.
        blocks: that each has at most.
    """

    def __init__(self, lengths: Sequence[int], blocks: int, device: torch.device) -> None:
        count, tokens = len(lengths), sum(lengths)
        sizes = [2 * tokens, count * blocks, count, count, count, count]
        self._new = partial(_Told, sizes, (count, blocks))
        self._told: list[_Told] = []
        self.words = torch.zeros(_words(sizes), dtype=torch.int32, device=device)
        slots_T, tables_BM, starts_B, begins_B, few_B, others_B = _parts(self.words, sizes)
        self.slots_T = slots_T.view(torch.int64)
        kernels = gpu.attention(device)
        few = [length for length in lengths if length <= kernels.FEW]
        others = [length for length in lengths if length > kernels.FEW]
        where = partial(kernels.Where, tables_BM.view(count, blocks), starts_B, begins_B)
        self.sequences: list[Any] = [where(few_B, max(few))] if few else []
        self.sequences += [where(others_B, max(others))] if others else []
        self._is_few = np.array([length <= kernels.FEW for length in lengths])
        self._begins = np.cumsum([0, *lengths[:-1]])

    @staticmethod
    def of(stretches: Sequence[Stretch], pool: BlockPool, device: torch.device) -> OnGPU:
        """Of these, and no more."""
        blocks = max(pool.blocks_for(stretch.end) for stretch in stretches)
        return OnGPU([stretch.length for stretch in stretches], blocks, device).filled(stretches, pool)

    def filled(self, stretches: Sequence[Stretch], pool: BlockPool) -> OnGPU:
        """With where these are now; rows of sequences that are not there become 0."""
        if len(self._told) < 2:
            told = self._new()
            told.begins[:] = self._begins
            self._told.append(told)
        else:
            told = self._told.pop(0)
            self._told.append(told)
        if told.read is not None:
            told.read.synchronize()
        told.fill(stretches, pool, self._is_few)
        self.words.copy_(told.words, non_blocking=True)
        if told.read is not None:
            told.read.record()
        return self


@dataclass(frozen=True)
class GPUPlaces(Places):
    """Of a step on a GPU."""

    step: OnGPU


@dataclass(frozen=True)
class ForOperators:
    """A step's sequences, of those with one token such of about one length together.

    Attributes:
        slots_T: where each token is kept.
        longer: start, rows among the step's tokens, and slots of all positions, of each with several tokens, or of all.
    """

    slots_T: Tensor
    singles: Sequence[Single]
    longer: Sequence[tuple[int, slice, Tensor]]

    @staticmethod
    def of(stretches: Sequence[Stretch], pool: BlockPool, device: torch.device, apart: bool = False) -> ForOperators:
        """Of these; with ``apart``, those with one token likewise one by one."""
        slots: list[Tensor] = []
        single: list[tuple[int, Tensor]] = []
        longer: list[tuple[int, slice, Tensor]] = []
        at = 0
        for stretch in stretches:
            blocks = torch.tensor(pool.tables[stretch.sequence][: pool.blocks_for(stretch.end)])
            slots_L = (blocks[:, None] * pool.size + torch.arange(pool.size)).flatten()[: stretch.end]
            slots.append(slots_L[stretch.start :])
            if stretch.length == 1 and not apart:
                single.append((at, slots_L))
            else:
                longer.append((stretch.start, slice(at, at + stretch.length), slots_L.to(device)))
            at += stretch.length
        return ForOperators(torch.cat(slots).to(device), [Single.of(some, device) for some in _of_one_length(single)], longer)


def _of_one_length(single: Sequence[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """Rows and slots, the longest first: in each part none is shorter than half of the longest, to whose length all are read."""
    found: list[list[tuple[int, Tensor]]] = []
    for each in sorted(single, key=lambda one: -len(one[1])):
        if not found or 2 * len(each[1]) < len(found[-1][0][1]):
            found.append([])
        found[-1].append(each)
    return found


@dataclass(frozen=True)
class Single:
    """Sequences of which a step computes one token, read to the length of the longest.

    Attributes:
        rows_B: where it is among the step's.
        lengths_B: positions of each, that token's included.
        slots_BL: of positions, the last one last; before the first of a shorter sequence stands some that is not looked at.
    """

    rows_B: Tensor
    lengths_B: Tensor
    slots_BL: Tensor

    @staticmethod
    def of(single: Sequence[tuple[int, Tensor]], device: torch.device) -> Single:
        lengths = [len(slots_L) for _, slots_L in single]
        # Of slots that nobody has written none would do: not a number times 0 is none either. The last one is written.
        slots_BL = torch.stack([torch.cat([slots_L[-1:].expand(max(lengths) - len(slots_L)), slots_L]) for _, slots_L in single])
        rows_B = torch.tensor([at for at, _ in single], device=device)
        return Single(rows_B, torch.tensor(lengths, device=device), slots_BL.to(device))

    def seen(self, window: int | None, sinks: int) -> tuple[Tensor, Tensor]:
        """Slots of what any of them sees, and who sees which; both ``[B, L]``."""
        length, device = self.slots_BL.shape[1], self.slots_BL.device
        last = length if window is None else min(window, length)
        behind_L = torch.arange(last - 1, -1, -1, device=device)
        slots_BL, seen_BL = self.slots_BL[:, length - last :], behind_L < self.lengths_B[:, None]
        if not sinks or last == length:
            return slots_BL, seen_BL
        first_S = torch.arange(min(sinks, length - last), device=device)
        at_BS = length - self.lengths_B[:, None] + first_S
        seen_BS = first_S < self.lengths_B[:, None] - last
        # A block that was left may be anybody's now, or nobody's.
        slots_BS = torch.where(seen_BS, self.slots_BL.gather(1, at_BS.clamp(max=length - 1)), self.slots_BL[:, -1:])
        return torch.cat([slots_BS, slots_BL], 1), torch.cat([seen_BS, seen_BL], 1)
