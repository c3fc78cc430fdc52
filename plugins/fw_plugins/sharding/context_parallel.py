"""Sequences divided between ranks: each computes some positions, and attention brings them together.

C ranks; l = L ÷ C, the positions of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fw.api import AttentionPlugin, CausalLM, Pattern, RunError, UserError, planned_gpu, positions
from fw_plugins.sharding import ring_attention
from fw_plugins.sharding.collectives import all_gather, all_reduce, exchange


def local_batch(batch: dict[str, Tensor], mesh: DeviceMesh, ring: bool) -> dict[str, Tensor]:
    """This rank's positions ``[B, l]`` of everything that has ``[B, L]``, and which they are: consecutive ones, or two chunks in a ring."""
    ids_BL = batch["input_ids"]
    whole = {**batch, "positions": positions(ids_BL, batch.get("segments")).expand_as(ids_BL)}

    def mine(x: Tensor) -> Tensor:
        return ring_attention.cut(x, mesh) if ring else x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()

    return {key: mine(value) if value.shape[1:2] == ids_BL.shape[1:] else value for key, value in whole.items()}


def check(model: CausalLM, ranks: int, heads: int, ring: bool) -> None:
    """Refuse a model whose attention ranks cannot divide.

    Args:
        heads: query heads of one rank.

    Raises:
        UserError: with the reason, or with the numbers of ranks that work.
    """
    if because := model.whole_sequences_because():
        raise UserError(f"sharding.context: ranks cannot divide a sequence of this model, because {because}; use context: 1")
    if ring:
        _check_ring(model)
    elif heads % ranks:
        fitting = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise UserError(f"sharding.context: {ranks} ranks exchange heads and do not divide the {heads} of each; what does: {fitting}")


def _check_ring(model: CausalLM) -> None:
    for block in model.kv_shapes:
        if block.window is not None:
            raise UserError(
                "sharding.context_method: keys passed round are for blocks that see everything before; this model has windows; use heads"
            )


class DividedSequences(AttentionPlugin):
    """Attention where each rank has some positions of every sequence; another plugin computes it where it has them whole."""

    def __init__(self, inner: AttentionPlugin, mesh: DeviceMesh) -> None:
        super().__init__(inner.config)
        self._inner, self._mesh, self._ranks = inner, mesh, mesh.size()
        self._whole = False

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Within it every rank has whole sequences."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def knows_positions(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook before forward: without positions, a rank would count its own from 0.

        Raises:
            RunError: the objective has not passed the batch's on.
        """
        if not self._whole and kwargs.get("positions_BL") is None:
            raise RunError("sharding.context: the objective does not pass the batch's positions to the model; it must, or use context: 1")

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the ranks that divide sequences."""
        return x if self._whole else all_reduce(x, self._mesh)


class PassedKeys(DividedSequences):
    """Causal attention with torch's flash kernels, keys and values passed round in a ring: no head is divided, so ranks may be many."""

    def plan(self, pattern: Pattern, device: torch.device) -> Any:
        """None: in a ring, order is all that there is.

        Raises:
            UserError: a window, or documents that share a row.
        """
        if self._whole:
            return self._inner.plan(pattern, device)
        if pattern.segments_BL is not None or pattern.window is not None:
            raise UserError("sharding.context_method: keys passed round know neither documents that share a row nor windows; use heads")
        return None

    def attend(
        self, q_BNlH: Tensor, k_BKlH: Tensor, v_BKlH: Tensor, plan: Any, *, scale: float, softcap: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """As the contract says, of this rank's positions.

        Raises:
            UserError: capped scores, dropout, or a device or dtype that torch has no flash kernel for.
        """
        if self._whole:
            return self._inner.attend(q_BNlH, k_BKlH, v_BKlH, plan, scale=scale, softcap=softcap, dropout=dropout)
        if softcap is not None or dropout or not ring_attention.has_kernel(q_BNlH):
            device = q_BNlH.device if (gpu := planned_gpu()) is None else gpu.name
            lacking = "caps scores" if softcap is not None else "drops weights" if dropout else f"takes {q_BNlH.dtype} on {device}"
            raise UserError(f"sharding.context_method: no flash kernel of torch {lacking}; use heads")
        return ring_attention.ring_attention(q_BNlH, k_BKlH, v_BKlH, scale, self._mesh)


class ExchangedHeads(DividedSequences):
    """Attention over whole sequences by another plugin, on some of the heads (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

    Before attention each rank gives its positions of most heads away and gets all positions of a few; after it, the reverse. Windows,
    documents and capped scores are the other plugin's as ever. Fewer key and value heads than ranks are repeated.
    """

    def plan(self, pattern: Pattern, device: torch.device) -> Any:
        """The other plugin's, for whole sequences."""
        if self._whole:
            return self._inner.plan(pattern, device)
        segments_BL = pattern.segments_BL
        if segments_BL is not None:
            segments_BL = all_gather(segments_BL, 1, self._mesh)
        return self._inner.plan(Pattern(pattern.length * self._ranks, pattern.window, segments_BL), device)

    def attend(
        self, q_BNlH: Tensor, k_BKlH: Tensor, v_BKlH: Tensor, plan: Any, *, scale: float, softcap: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """As the contract says, of this rank's positions."""
        if self._whole:
            return self._inner.attend(q_BNlH, k_BKlH, v_BKlH, plan, scale=scale, softcap=softcap, dropout=dropout)
        heads, kv_heads = q_BNlH.shape[1], k_BKlH.shape[1]
        repeats = self._ranks // math.gcd(kv_heads, self._ranks)
        repeats = repeats if heads % (kv_heads * repeats) == 0 else heads // kv_heads
        if repeats > 1:
            k_BKlH, v_BKlH = k_BKlH.repeat_interleave(repeats, 1), v_BKlH.repeat_interleave(repeats, 1)
        parts = [x.unflatten(1, (self._ranks, -1)) for x in (q_BNlH, k_BKlH, v_BKlH)]  # [B, C, heads ÷ C, l, H] each
        sizes = [part.shape[2] for part in parts]
        exchanged_CBnlH = exchange(torch.cat(parts, dim=2).transpose(0, 1), self._mesh)
        q, k, v = exchanged_CBnlH.permute(1, 2, 0, 3, 4).flatten(2, 3).split(sizes, dim=1)
        out_BnLH = self._inner.attend(q, k, v, plan, scale=scale, softcap=softcap, dropout=dropout)
        out_CBnlH = exchange(out_BnLH.unflatten(2, (self._ranks, -1)).permute(2, 0, 1, 3, 4), self._mesh)
        return out_CBnlH.transpose(0, 1).flatten(1, 2)
