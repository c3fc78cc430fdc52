"""A cache of blocks: where everything is, and attention to it, by the kernels or in torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fw.api import KVCache, KVNeeds, KVShape, Places, Stretch
from fw.api.kernels import attend_blocks, available, keep
from fw_plugins.kv_cache.attending import attend, attend_to_all
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.keeping import Keeping


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
        known = all(keeping.rows(shape.head_dim) is not None for shape in needs.shapes)
        self._kernel = known and available(needs.dtype, needs.device)
        self._step: _ForKernel | _ForOperators | None = None

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
        """Of the kernel."""
        if not self._kernel:
            return None
        step = _ForKernel.empty(len(lengths), self.pool.blocks_for(self._needs.longest), sum(lengths))
        return _KernelPlaces([*self._keys, *self._values, step.slots_T, step.tables_BM, step.starts_B, step.lengths_B], step)

    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        """Where everything is, once for all blocks of the model."""
        if not self._kernel:
            self._step = _ForOperators.of(stretches, self.pool, self._needs.device)
        elif places is None:
            self._step = _ForKernel.of(stretches, self.pool)
        else:
            assert isinstance(places, _KernelPlaces)
            self._step = places.step.filled(stretches, self.pool)

    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """All sequences at once by the kernel; else those with one token at once, and the others one after another."""
        keys, values, step = self._keys[block], self._values[block], self._step
        assert step is not None
        window, sinks = self._needs.shapes[block].window, 0
        if self._bounds is not None and (window is None or window > self._bounds.window):
            window, sinks = self._bounds.window, self._bounds.sinks
        dim = q_TNH.shape[-1]
        if isinstance(step, _ForKernel):
            rows = self._keeping.rows(dim)
            assert rows is not None
            keep(k_TKH, step.slots_T, keys, rows)
            keep(v_TKH, step.slots_T, values, rows)
            at = (step.tables_BM, step.starts_B, step.lengths_B)
            return attend_blocks(q_TNH, keys, values, rows, *at, window=window, sinks=sinks, scale=scale, softcap=softcap)
        size = self.pool.size
        for kept, x_TKH in ((keys, k_TKH), (values, v_TKH)):
            kept[step.slots_T // size, :, step.slots_T % size] = self._keeping.encode(x_TKH)
        out_TNH = torch.empty_like(q_TNH)
        if (single := step.single) is not None:
            slots_BL, seen_BL = single.seen(window, sinks)
            k_BLKH, v_BLKH = (self._keeping.decode(kept[slots_BL // size, :, slots_BL % size], dim) for kept in (keys, values))
            out_TNH[single.rows_B] = attend_to_all(q_TNH[single.rows_B], k_BLKH, v_BLKH, seen_BL, scale=scale, softcap=softcap)
        for start, now, slots_L in step.longer:
            first = 0 if window is None else max(0, start - window + 1)
            positions_L = torch.arange(len(slots_L), device=q_TNH.device)
            if sinks < first:
                positions_L = torch.cat([positions_L[:sinks], positions_L[first:]])
            seen_L = slots_L[positions_L]
            k_LKH, v_LKH = (self._keeping.decode(kept[seen_L // size, :, seen_L % size], dim) for kept in (keys, values))
            how = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "positions_L": positions_L}
            out_TNH[now] = attend(q_TNH[now], k_LKH, v_LKH, **how)  # type: ignore[arg-type]
        return out_TNH


@dataclass(frozen=True)
class _ForKernel:
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
    def empty(sequences: int, blocks: int, tokens: int) -> _ForKernel:
        """Of sequences with so many blocks at most, and so many tokens of the step's in all."""
        whole = partial(torch.empty, dtype=torch.int32)
        slots_T = torch.empty(tokens, dtype=torch.int64)
        return _ForKernel(slots_T, whole((sequences, blocks)), whole(sequences), whole(sequences))

    @staticmethod
    def of(stretches: Sequence[Stretch], pool: BlockPool) -> _ForKernel:
        blocks = max(pool.blocks_for(stretch.end) for stretch in stretches)
        return _ForKernel.empty(len(stretches), blocks, sum(stretch.length for stretch in stretches)).filled(stretches, pool)

    def filled(self, stretches: Sequence[Stretch], pool: BlockPool) -> _ForKernel:
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
class _KernelPlaces(Places):
    step: _ForKernel


@dataclass(frozen=True)
class _ForOperators:
    """A step's sequences, those with one token together.

    Attributes:
        slots_T: where each token is kept.
        longer: start, rows among the step's tokens, and slots of all positions, of each with several tokens.
    """

    slots_T: Tensor
    single: _Single | None
    longer: Sequence[tuple[int, slice, Tensor]]

    @staticmethod
    def of(stretches: Sequence[Stretch], pool: BlockPool, device: torch.device) -> _ForOperators:
        slots: list[Tensor] = []
        single: list[tuple[int, Tensor]] = []
        longer: list[tuple[int, slice, Tensor]] = []
        at = 0
        for stretch in stretches:
            blocks = torch.tensor(pool.tables[stretch.sequence][: pool.blocks_for(stretch.end)])
            slots_L = (blocks[:, None] * pool.size + torch.arange(pool.size)).flatten()[: stretch.end]
            slots.append(slots_L[stretch.start :])
            if stretch.length == 1:
                single.append((at, slots_L))
            else:
                longer.append((stretch.start, slice(at, at + stretch.length), slots_L.to(device)))
            at += stretch.length
        return _ForOperators(torch.cat(slots).to(device), _Single.of(single, device) if single else None, longer)


@dataclass(frozen=True)
class _Single:
    """Sequences of which a step computes one token.

    Attributes:
        rows_B: where it is among the step's.
        lengths_B: positions of each, that token's included.
        slots_BL: of positions, the last one last; before the first of a shorter sequence stands some that is not looked at.
    """

    rows_B: Tensor
    lengths_B: Tensor
    slots_BL: Tensor

    @staticmethod
    def of(single: Sequence[tuple[int, Tensor]], device: torch.device) -> _Single:
        lengths = [len(slots_L) for _, slots_L in single]
        # Of slots that nobody has written none would do: not a number times 0 is none either. The last one is written.
        slots_BL = torch.stack([torch.cat([slots_L[-1:].expand(max(lengths) - len(slots_L)), slots_L]) for _, slots_L in single])
        rows_B = torch.tensor([at for at, _ in single], device=device)
        return _Single(rows_B, torch.tensor(lengths, device=device), slots_BL.to(device))

    def seen(self, window: int | None, sinks: int) -> tuple[Tensor, Tensor]:
        """Slots of what any of them sees, and who sees which; both ``[B, L]``."""
        length = self.slots_BL.shape[1]
        behind_L = torch.arange(length - 1, -1, -1, device=self.slots_BL.device)
        seen_BL = behind_L < self.lengths_B[:, None]
        if window is None:
            return self.slots_BL, seen_BL
        if not sinks:
            return self.slots_BL[:, -window:], seen_BL[:, -window:]
        seen_BL &= (behind_L < window) | (self.lengths_B[:, None] - 1 - behind_L < sinks)
        # A block that was left may be anybody's now, or nobody's.
        return torch.where(seen_BL, self.slots_BL, self.slots_BL[:, -1:]), seen_BL
