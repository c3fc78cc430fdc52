"""Blocks of tokens, wherever there is room, by a table for each sequence (Kwon et al. 2023, https://arxiv.org/abs/2309.06180)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fw.errors import UserError
from fw.kernels.attention import attend_blocks, available
from fw.kinds.kv_cache import KVCache, KVCachePlugin, KVNeeds, Stretch
from fw.kinds.model import KVShape
from fw_plugins.kv_cache.attending import attend, attend_to_all
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.contiguous import kept_bytes


@dataclass
class PagedConfig:
    """How memory is divided."""

    block_size: int = 16
    """Tokens of a block. A sequence wastes half of one on average; a beginning that two share is shared by whole blocks."""
    reuse_prefixes: bool = True
    """Keep what is in full blocks when their sequence has ended, for others that begin with the same tokens, until room is needed."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"kv_cache.block_size: {self.block_size} is too small; the least is 1")


class Paged(KVCachePlugin):
    """Keys and values in blocks that sequences share where they begin alike: no memory is kept free for what may come."""

    Config = PagedConfig

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Keys and values."""
        return kept_bytes(shapes, dtype)

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as blocks are used."""
        size = self.config.block_size
        count = int(needs.budget_bytes // (kept_bytes(needs.shapes, needs.dtype) * size))
        if count < 1:
            raise UserError(f"inference.kv_budget: {needs.budget_bytes} bytes hold no block of {size} tokens")
        return PagedCache(needs, BlockPool(count, size, self.config.reuse_prefixes))


class PagedCache(KVCache):
    """Of each block of the model ``[blocks · block size, K, H]`` keys, and values likewise."""

    def __init__(self, needs: KVNeeds, pool: BlockPool) -> None:
        self._needs, self.pool = needs, pool
        # On the host nothing is there before it is written to.
        self._keys = [self._empty(shape) for shape in needs.shapes]
        self._values = [self._empty(shape) for shape in needs.shapes]
        self._kernel = available(needs.dtype, needs.device)
        self._single: _Single | None = None
        self._longer: list[tuple[Stretch, slice, Tensor]] = []
        self._slots_T = torch.empty(0, dtype=torch.int64)

    def _empty(self, shape: KVShape) -> Tensor:
        return torch.empty(
            self.pool.count * self.pool.size, shape.heads, shape.head_dim, dtype=self._needs.dtype, device=self._needs.device
        )

    @property
    def capacity(self) -> int:
        """All blocks."""
        return self.pool.count * self.pool.size

    @property
    def live_bytes(self) -> int:
        """Blocks that sequences have, or that are known."""
        return self.pool.taken * self.pool.size * kept_bytes(self._needs.shapes, self._needs.dtype)

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """Whole blocks; one that is shared is copied before it is written to."""
        copies = self.pool.reserve(sequence, start, end)
        for source, target in copies or ():
            for kept in (*self._keys, *self._values):
                blocks = kept.unflatten(0, (self.pool.count, self.pool.size))
                blocks[target] = blocks[source]
        return copies is not None

    def release(self, sequence: int) -> None:
        """Blocks that nobody else has are free, or known to whoever begins with them."""
        self.pool.release(sequence)

    def fork(self, source: int, target: int, length: int) -> bool:
        """Nothing is copied before one of them writes."""
        self.pool.fork(source, target, length)
        return True

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """Whole blocks."""
        return self.pool.reuse(sequence, tokens)

    def written(self, sequence: int, tokens: Sequence[int], count: int) -> None:
        """Whole blocks."""
        self.pool.written(sequence, tokens, count)

    def begin(self, stretches: Sequence[Stretch]) -> None:
        """Where everything is, once for all blocks of the model."""
        size, device = self.pool.size, self._needs.device
        slots: list[Tensor] = []
        single: list[tuple[int, Stretch]] = []
        self._longer, at = [], 0
        for stretch in stretches:
            table = self.pool.tables[stretch.sequence]
            if stretch.length == 1:
                single.append((at, stretch))
                slots.append(torch.tensor([table[stretch.start // size] * size + stretch.start % size]))
            else:
                slots_L = _slots(table, stretch.end, size)
                slots.append(slots_L[stretch.start :])
                self._longer.append((stretch, slice(at, at + stretch.length), slots_L.to(device)))
            at += stretch.length
        self._slots_T = torch.cat(slots).to(device)
        self._single = _Single.of(single, self.pool, device, self._kernel) if single else None

    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """Sequences with one token all at once, the others one after another."""
        keys, values, window = self._keys[block], self._values[block], self._needs.shapes[block].window
        keys.index_copy_(0, self._slots_T, k_TKH)
        values.index_copy_(0, self._slots_T, v_TKH)
        single = self._single
        if single is not None and not self._longer:
            return single.attend(q_TNH, keys, values, window, scale, softcap)
        out_TNH = torch.empty_like(q_TNH)
        if single is not None:
            out_TNH[single.rows_B] = single.attend(q_TNH[single.rows_B], keys, values, window, scale, softcap)
        for stretch, now, slots_L in self._longer:
            seen_L = slots_L if window is None else slots_L[max(0, stretch.start - window + 1) :]
            out_TNH[now] = attend(q_TNH[now], keys[seen_L], values[seen_L], window=window, scale=scale, softcap=softcap)
        return out_TNH


def _slots(table: Sequence[int], count: int, size: int) -> Tensor:
    """Where the first ``count`` tokens are."""
    blocks = torch.tensor(table[: -(-count // size)])
    return (blocks[:, None] * size + torch.arange(size)).flatten()[:count]


@dataclass
class _Single:
    """Sequences of which a step computes one token.

    Attributes:
        rows_B: where it is among the step's.
        lengths_B: int32; tokens that it sees, itself included.
        block_size: tokens of a block.
        tables_BM: int32; blocks of each sequence, for the kernel; None where there is none.
        slots_BL: for torch's operators: where tokens are, the last one last; what stands before the first of a shorter sequence is not
            looked at.
    """

    rows_B: Tensor
    lengths_B: Tensor
    block_size: int
    tables_BM: Tensor | None
    slots_BL: Tensor | None

    @staticmethod
    def of(single: Sequence[tuple[int, Stretch]], pool: BlockPool, device: torch.device, kernel: bool) -> _Single:
        rows_B = torch.tensor([at for at, _ in single], device=device)
        lengths_B = torch.tensor([stretch.end for _, stretch in single], dtype=torch.int32, device=device)
        longest = max(stretch.end for _, stretch in single)
        if kernel:
            tables_BM = torch.zeros(len(single), pool.blocks_for(longest), dtype=torch.int32)
            for row, (_, stretch) in enumerate(single):
                table = pool.tables[stretch.sequence][: pool.blocks_for(stretch.end)]
                tables_BM[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            return _Single(rows_B, lengths_B, pool.size, tables_BM, None)
        slots_BL = torch.zeros(len(single), longest, dtype=torch.int64)
        for row, (_, stretch) in enumerate(single):
            slots_L = _slots(pool.tables[stretch.sequence], stretch.end, pool.size)
            slots_BL[row] = slots_L[0]  # of values that nobody has written, none would do: not a number times 0 is none either
            slots_BL[row, longest - stretch.end :] = slots_L
        return _Single(rows_B, lengths_B, pool.size, None, slots_BL.to(device))

    def attend(
        self, q_BNH: Tensor, keys_SKH: Tensor, values_SKH: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """Of each sequence the last token, over all that it sees."""
        if self.tables_BM is not None:
            return attend_blocks(
                q_BNH,
                keys_SKH,
                values_SKH,
                self.tables_BM,
                self.lengths_B,
                block_size=self.block_size,
                window=window,
                scale=scale,
                softcap=softcap,
            )
        assert self.slots_BL is not None
        slots_BL = self.slots_BL if window is None else self.slots_BL[:, -window:]
        length = slots_BL.shape[1]
        seen_BL = torch.arange(length, 0, -1, device=slots_BL.device) <= self.lengths_B[:, None]
        return attend_to_all(q_BNH, keys_SKH[slots_BL], values_SKH[slots_BL], seen_BL, scale=scale, softcap=softcap)
