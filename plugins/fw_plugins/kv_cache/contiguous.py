"""Each sequence has memory of its own, that grows with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, Places, Stretch, UserError
from fw_plugins.kv_cache.attending import attend, attend_in_tiles

_GROWTH = 64
"""Tokens that room is made for at once, at least."""


class Contiguous(KVCachePlugin):
    """Keys and values of a sequence one behind another: nothing is gathered, nothing shared; memory grows by a quarter at a time."""

    batch_invariant = True

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Keys and values."""
        return _token_bytes(shapes, dtype)

    def make(self, needs: KVNeeds) -> KVCache:
        """Takes nothing yet."""
        return _ContiguousCache(needs)


def _token_bytes(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
    """Of a token, over all blocks."""
    return sum(2 * shape.heads * shape.head_dim for shape in shapes) * dtype.itemsize


class _ContiguousCache(KVCache):
    def __init__(self, needs: KVNeeds) -> None:
        self._needs = needs
        self._most = int(needs.budget_bytes // _token_bytes(needs.shapes, needs.dtype))
        if self._most < 1:
            raise UserError(f"inference.kv_budget: {needs.budget_bytes} bytes hold no token")
        self._room: dict[int, int] = {}
        """Tokens that there is room for, by sequence."""
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._stretches: Sequence[Stretch] = ()

    @property
    def capacity(self) -> int:
        """As many as the budget holds."""
        return self._most

    @property
    def live_bytes(self) -> int:
        """Room, whether it is used or not."""
        return sum(self._room.values()) * _token_bytes(self._needs.shapes, self._needs.dtype)

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """A quarter more than was there, where that fits."""
        room = self._room.get(sequence, 0)
        if end <= room:
            return True
        free = self._most - sum(self._room.values()) + room
        if end > free:
            return False
        self._resize(sequence, min(max(end, room + room // 4, room + _GROWTH), free), start)
        return True

    def _resize(self, sequence: int, room: int, used: int) -> None:
        for those in (self._keys, self._values):
            kept = those.setdefault(sequence, [self._empty(shape, 0) for shape in self._needs.shapes])
            for number, shape in enumerate(self._needs.shapes):
                grown = self._empty(shape, room)
                grown[:used] = kept[number][:used]
                kept[number] = grown
        self._room[sequence] = room

    def _empty(self, shape: KVShape, tokens: int) -> Tensor:
        return torch.empty(tokens, shape.heads, shape.head_dim, dtype=self._needs.dtype, device=self._needs.device)

    def release(self, sequence: int) -> None:
        """Its memory with it."""
        for those in (self._room, self._keys, self._values):
            those.pop(sequence, None)

    def fork(self, source: int, target: int, length: int) -> bool:
        """A copy."""
        if not self.reserve(target, 0, length):
            return False
        for those in (self._keys, self._values):
            for kept, of in zip(those[target], those[source], strict=True):
                kept[:length] = of[:length]
        return True

    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        """Nothing is to be prepared."""
        self._stretches = stretches

    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """One sequence after another."""
        out_TNH = torch.empty_like(q_TNH)
        window = self._needs.shapes[block].window
        at = 0
        for stretch in self._stretches:
            keys, values, now = self._keys[stretch.sequence][block], self._values[stretch.sequence][block], slice(at, at + stretch.length)
            keys[stretch.start : stretch.end], values[stretch.start : stretch.end] = k_TKH[now], v_TKH[now]
            at += stretch.length
            if self._needs.batch_invariant:
                how = {"window": window, "scale": scale, "softcap": softcap}
                out_TNH[now] = attend_in_tiles(q_TNH[now], stretch.start, keys.__getitem__, values.__getitem__, **how)  # type: ignore[arg-type]
                continue
            first = 0 if window is None else max(0, stretch.start - window + 1)
            seen = slice(first, stretch.end)
            out_TNH[now] = attend(q_TNH[now], keys[seen], values[seen], window=window, scale=scale, softcap=softcap)
        return out_TNH
