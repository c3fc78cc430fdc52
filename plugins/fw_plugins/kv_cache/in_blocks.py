"""A cache of blocks: where everything is, and attention to it, by the kernels or in torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fw.api import KVCache, KVNeeds, KVShape, Places, Stretch
from fw.api.kernels import attend_blocks, available, gpu, keep
from fw_plugins.kv_cache.attending import attend, attend_in_tiles, attend_to_all
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.keeping import Keeping, Plain
from fw_plugins.kv_cache.steps import ForKernel, ForOperators, GPUPlaces, KernelPlaces, OnGPU


@dataclass(frozen=True)
class Bounds:
    """What is kept of a long sequence.

    Attributes:
        window: the last so many positions.
        sinks: and the first so many (Xiao et al. 2023, https://arxiv.org/abs/2309.17453).
    """

    window: int
    sinks: int


class CacheInBlocks(KVCache):
    """Of each block of the model ``[C, K, S, R]`` bytes of keys, and values likewise: C blocks of tokens, K heads, S tokens of a block, R
    bytes of a row.

    Args:
        bounds: None where everything is kept.
    """

    def __init__(self, needs: KVNeeds, pool: BlockPool, keeping: Keeping, bounds: Bounds | None = None) -> None:
        self._needs, self.pool, self._keeping, self._bounds = needs, pool, keeping, bounds
        # On the host nothing is there before it is written to.
        self._keys = [self._empty(shape) for shape in needs.shapes]
        self._values = [self._empty(shape) for shape in needs.shapes]
        rows = [keeping.rows(shape.head_dim) for shape in needs.shapes]
        self._kernel = None not in rows and available(needs.dtype, needs.device)
        # Kernels of GPUs divide keys by how many sequences there are.
        self._on_gpu = None if needs.batch_invariant else gpu.attention(needs.device)
        if self._on_gpu is not None and not all(map(self._on_gpu.takes, rows)):
            self._on_gpu = None
        self._step: ForKernel | OnGPU | ForOperators | None = None

    def _empty(self, shape: KVShape) -> Tensor:
        sizes = (self.pool.count, shape.heads, self.pool.size, self._keeping.row_bytes(shape.head_dim))
        return torch.empty(sizes, dtype=torch.uint8, device=self._needs.device)

    @property
    def capacity(self) -> int:
        """All blocks; where only bounds are kept, whatever is wanted, as soon as these fit."""
        room = self.pool.count * self.pool.size
        if self._bounds is not None and room >= self.most_kept(self._bounds, self._needs.step_tokens, self.pool.size):
            return max(room, self._needs.longest)
        return room

    @staticmethod
    def most_kept(bounds: Bounds, step_tokens: int, block_size: int) -> int:
        """Tokens of a sequence that there is room for at once: bounds, a step's, and what their blocks are not filled with."""
        return bounds.sinks + bounds.window + step_tokens + 3 * block_size

    @property
    def live_bytes(self) -> int:
        """Blocks that sequences have, or that are known."""
        return self._bytes(self.pool.taken)

    @property
    def used_bytes(self) -> int:
        """Blocks that sequences have."""
        return self._bytes(self.pool.count - self.pool.available)

    def _bytes(self, blocks: int) -> int:
        return blocks * self.pool.size * sum(self._keeping.token_bytes(shape) for shape in self._needs.shapes)

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """Whole blocks; one that is shared is copied before it is written to. What nobody will see any more is left."""
        if self._bounds is not None:
            self.pool.trim(sequence, self._bounds.sinks, start + 1 - self._bounds.window)
        copies = self.pool.reserve(sequence, start, end)
        for source, target in copies or ():
            for kept in (*self._keys, *self._values):
                kept[target] = kept[source]
        return copies is not None

    def release(self, sequence: int) -> None:
        """Blocks that nobody else has are free, or known to whoever begins with them."""
        self.pool.release(sequence)

    def fork(self, source: int, target: int, length: int) -> bool:
        """Nothing is copied before one of them writes."""
        self.pool.fork(source, target, length)
        return True

    def reuse(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Whole blocks."""
        return self.pool.reuse(sequence, tokens, salt)

    def written(self, sequence: int, tokens: Sequence[int], count: int, salt: bytes = b"") -> None:
        """Whole blocks."""
        self.pool.written(sequence, tokens, count, salt)

    def places(self, lengths: Sequence[int]) -> Places | None:
        """Of the kernels."""
        if self._on_gpu is not None:
            on_gpu = OnGPU(lengths, self.pool.blocks_for(self._needs.longest), self._needs.device)
            return GPUPlaces([on_gpu.words, *self._keys, *self._values], on_gpu)
        if not self._kernel:
            return None
        step = ForKernel.empty(len(lengths), self.pool.blocks_for(self._needs.longest), sum(lengths))
        return KernelPlaces([*self._keys, *self._values, step.slots_T, step.tables_BM, step.starts_B, step.lengths_B], step)

    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        """Where everything is, once for all blocks of the model."""
        if isinstance(places, GPUPlaces):
            self._step = places.step.filled(stretches, self.pool)
        elif self._on_gpu is not None:
            self._step = OnGPU.of(stretches, self.pool, self._needs.device)
        elif not self._kernel:
            self._step = ForOperators.of(stretches, self.pool, self._needs.device, apart=self._needs.batch_invariant)
        elif places is None:
            self._step = ForKernel.of(stretches, self.pool)
        else:
            assert isinstance(places, KernelPlaces)
            self._step = places.step.filled(stretches, self.pool)

    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """All sequences at once by the kernels; else those with one token at once, and the others one after another."""
        keys, values, step = self._keys[block], self._values[block], self._step
        assert step is not None
        window, sinks = self._needs.shapes[block].window, 0
        if self._bounds is not None and (window is None or window > self._bounds.window):
            window, sinks = self._bounds.window, self._bounds.sinks
        dim = q_TNH.shape[-1]
        if isinstance(step, ForKernel):
            rows = self._keeping.rows(dim)
            assert rows is not None
            keep(k_TKH, step.slots_T, keys, rows)
            keep(v_TKH, step.slots_T, values, rows)
            at = (step.tables_BM, step.starts_B, step.lengths_B)
            return attend_blocks(q_TNH, keys, values, rows, *at, window=window, sinks=sinks, scale=scale, softcap=softcap)
        if isinstance(step, OnGPU):
            rows = self._keeping.rows(dim)
            assert rows is not None and self._on_gpu is not None
            q_TNH, k_TKH, v_TKH = (_heads_together(x) for x in (q_TNH, k_TKH, v_TKH))
            if isinstance(self._keeping, Plain):
                self._on_gpu.keep(k_TKH, v_TKH, step.slots_T, keys.view(k_TKH.dtype), values.view(k_TKH.dtype))
            else:
                self._on_gpu.keep(self._keeping.encode(k_TKH), self._keeping.encode(v_TKH), step.slots_T, keys, values)
            how_seen = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap}
            found_TNH: Tensor = self._on_gpu.attend_blocks(q_TNH, keys, values, rows, step.sequences, **how_seen)
            return found_TNH
        size = self.pool.size
        for kept, x_TKH in ((keys, k_TKH), (values, v_TKH)):
            kept[step.slots_T // size, :, step.slots_T % size] = self._keeping.encode(x_TKH)
        out_TNH = torch.empty_like(q_TNH)
        for single in step.singles:
            slots_BL, seen_BL = single.seen(window, sinks)
            k_BLKH, v_BLKH = (self._keeping.decode(kept[slots_BL // size, :, slots_BL % size], dim) for kept in (keys, values))
            out_TNH[single.rows_B] = attend_to_all(q_TNH[single.rows_B], k_BLKH, v_BLKH, seen_BL, scale=scale, softcap=softcap)
        for start, now, slots_L in step.longer:
            if self._needs.batch_invariant:
                read = (partial(self._read, kept, slots_L, dim) for kept in (keys, values))
                out_TNH[now] = attend_in_tiles(q_TNH[now], start, *read, window=window, sinks=sinks, scale=scale, softcap=softcap)
                continue
            first = 0 if window is None else max(0, start - window + 1)
            positions_L = torch.arange(len(slots_L), device=q_TNH.device)
            if sinks < first:
                positions_L = torch.cat([positions_L[:sinks], positions_L[first:]])
            seen_L = slots_L[positions_L]
            k_LKH, v_LKH = (self._keeping.decode(kept[seen_L // size, :, seen_L % size], dim) for kept in (keys, values))
            how = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "positions_L": positions_L}
            out_TNH[now] = attend(q_TNH[now], k_LKH, v_LKH, **how)  # type: ignore[arg-type]
        return out_TNH

    def _read(self, kept: Tensor, slots_L: Tensor, dim: int, positions_L: Tensor) -> Tensor:
        slots_L, size = slots_L[positions_L], self.pool.size
        return self._keeping.decode(kept[slots_L // size, :, slots_L % size], dim)


def _heads_together(x_TNH: Tensor) -> Tensor:
    """A token's heads lie behind one another, wherever tokens lie."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()
