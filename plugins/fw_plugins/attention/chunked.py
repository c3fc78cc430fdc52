"""Attention for some queries at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fw.api import AttentionPlugin, Pattern, UserError


@dataclass
class ChunkedConfig:
    """How many queries."""

    queries: int = 256
    """Queries whose scores exist at a time: they take heads · queries · length · 4 bytes per sequence, in forward and in backward."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise UserError(f"attention.queries: {self.queries} is too small; the least is 1")


class _Plan(NamedTuple):
    window: int | None
    segments_BL: Tensor | None


class ChunkedAttention(AttentionPlugin):
    """Attention written out for some queries at a time, and again in backward: memory in proportion to the length on any device.

    For what no fused kernel does, capped scores above all; keys that a chunk cannot see (later ones, or before its window) are not
    multiplied. Where a kernel exists, `sdpa` is faster.
    """

    api = 1
    Config = ChunkedConfig
    config: ChunkedConfig

    def plan(self, pattern: Pattern, device: torch.device) -> _Plan:
        """The pattern itself: masks are made chunk by chunk."""
        return _Plan(pattern.window, None if pattern.segments_BL is None else pattern.segments_BL.to(device))

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        plan: _Plan,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As the contract says; the softmax is taken in fp32."""
        length, size = q_BNLH.shape[2], self.config.queries
        outs = []
        for first in range(0, length, size):
            end = min(first + size, length)
            start = 0 if plan.window is None else max(0, first - plan.window + 1)
            given = q_BNLH[:, :, first:end], k_BKLH[:, :, start:end], v_BKLH[:, :, start:end], first, start, plan, scale, softcap, dropout
            # What is computed once only need not be forgotten.
            again = torch.is_grad_enabled() and length > size
            outs.append(checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=dropout > 0) if again else _attend(*given))
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]


def _attend(
    q_BNcH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    first: int,
    start: int,
    plan: _Plan,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Queries from position ``first``, keys from ``start``. Query heads of a group share their keys: they are rows of one product."""
    kv_heads = k_BKSH.shape[1]
    group = q_BNcH.shape[1] // kv_heads
    q_BKgH = q_BNcH.unflatten(1, (kv_heads, group)).flatten(2, 3)
    scores_BKGcS = (q_BKgH @ k_BKSH.transpose(-1, -2) * scale).unflatten(2, (group, -1))
    if softcap is not None:
        scores_BKGcS = softcap * torch.tanh(scores_BKGcS / softcap)
    mask_BcS = _seen(first, q_BNcH.shape[2], start, k_BKSH.shape[2], plan, q_BNcH.device)
    scores_BKGcS = scores_BKGcS.masked_fill(~mask_BcS[:, None, None], float("-inf"))
    weights_BKGcS = scores_BKGcS.float().softmax(-1).to(v_BKSH.dtype)
    if dropout:
        weights_BKGcS = F.dropout(weights_BKGcS, dropout)
    return (weights_BKGcS.flatten(2, 3) @ v_BKSH).unflatten(2, (group, -1)).flatten(1, 2)


def _seen(first: int, queries: int, start: int, keys: int, plan: _Plan, device: torch.device) -> Tensor:
    """Whom a chunk's queries see of its keys: bool ``[B or 1, c, S]``."""
    behind_cS = torch.arange(first, first + queries, device=device)[:, None] - torch.arange(start, start + keys, device=device)[None, :]
    seen_BcS = (behind_cS >= 0)[None]
    if plan.window is not None:
        seen_BcS = seen_BcS & (behind_cS < plan.window)
    if plan.segments_BL is not None:
        segments_BL = plan.segments_BL
        seen_BcS = seen_BcS & (segments_BL[:, first : first + queries, None] == segments_BL[:, None, start : start + keys])
    return seen_BcS
