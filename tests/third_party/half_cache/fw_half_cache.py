"""Keys and values in float16, whatever the model computes in: half the memory of fp32. K heads of keys and values, H numbers of a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, Places, Stretch, UserError

_BYTES = 2


class InHalves(KVCache):
    """Of each sequence and block ``[2, room, K, H]``, where room doubles when it is full."""

    def __init__(self, needs: KVNeeds, token_bytes: float) -> None:
        self._needs, self._token_bytes = needs, token_bytes
        self._most = int(needs.budget_bytes // token_bytes)
        if not self._most:
            raise UserError(f"inference.kv_budget: {needs.budget_bytes} bytes hold no token, which takes {token_bytes:.0f}")
        self._kept: dict[int, list[Tensor]] = {}
        self._step: Sequence[Stretch] = ()

    @property
    def capacity(self) -> int:
        return self._most

    @property
    def live_bytes(self) -> int:
        return int(sum(kept[0].shape[1] for kept in self._kept.values()) * self._token_bytes)

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        before = self._kept.get(sequence)
        room = 0 if before is None else before[0].shape[1]
        if end <= room:
            return True
        others = sum(kept[0].shape[1] for number, kept in self._kept.items() if number != sequence)
        if others + end > self._most:
            return False
        grown = max(end, min(2 * room, self._most - others))
        self._kept[sequence] = [
            self._grown(None if before is None else before[n], grown, shape) for n, shape in enumerate(self._needs.shapes)
        ]
        return True

    def _grown(self, before: Tensor | None, room: int, shape: KVShape) -> Tensor:
        made = torch.zeros(2, room, shape.heads, shape.head_dim, dtype=torch.float16, device=self._needs.device)
        if before is not None:
            made[:, : before.shape[1]] = before
        return made

    def release(self, sequence: int) -> None:
        self._kept.pop(sequence, None)

    def fork(self, source: int, target: int, length: int) -> bool:
        if not self.reserve(target, 0, length):
            return False
        for to, of in zip(self._kept[target], self._kept[source], strict=True):
            to[:, :length] = of[:, :length]
        return True

    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        self._step = stretches

    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        if softcap is not None:
            raise UserError("kv_cache: half bounds no scores (softcap); use another one with this model")
        window, out_TNH, at = self._needs.shapes[block].window, torch.empty_like(q_TNH), 0
        for stretch in self._step:
            own, at = slice(at, at + stretch.length), at + stretch.length
            kept = self._kept[stretch.sequence][block]
            kept[0, stretch.start : stretch.end], kept[1, stretch.start : stretch.end] = k_TKH[own].half(), v_TKH[own].half()
            q, k, v = (x.transpose(0, 1) for x in (q_TNH[own], *kept[:, : stretch.end].to(q_TNH.dtype)))
            positions = torch.arange(stretch.end, device=q.device)
            behind = positions[stretch.start :, None] - positions
            seen = (behind >= 0) & (behind < (window or stretch.end))
            out_TNH[own] = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True).transpose(0, 1)
        return out_TNH


class Half(KVCachePlugin):
    """Keys and values in float16, which rounds those of fp32 to 3 digits and takes half of their memory."""

    api = 1
    lossless = False

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Two numbers of 2 bytes for each of a head's."""
        return sum(2 * shape.heads * shape.head_dim for shape in shapes) * _BYTES

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as sequences grow."""
        return InHalves(needs, self.token_bytes(needs.shapes, needs.dtype))
