"""The contract of ``attention``: how queries, keys and values become outputs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fw.registry import Plugin

if TYPE_CHECKING:
    from fw.kinds.model import CausalLM
    from fw.kinds.sharding import StepSpec


@dataclass(frozen=True)
class Pattern:
    """Who sees whom: position i sees position j where j ≤ i, i - j < ``window``, and both are in the same segment.

    Attributes:
        length: positions of a sequence.
        window: how many positions back a position sees, itself included; None for all.
        segments_BL: int64; the document of each position where documents share a row, 0 for padding; None where a row is one document.
    """

    length: int
    window: int | None = None
    segments_BL: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """Whether nothing but order matters."""
        return self.segments_BL is None and (self.window is None or self.window >= self.length)

    def seen(self, device: torch.device) -> Tensor:
        """The pattern written out, bool ``[B or 1, 1, L, L]``: True where the row's position sees the column's."""
        at_L = torch.arange(self.length, device=device)
        behind_LL = at_L[:, None] - at_L[None, :]
        seen_BLL = (behind_LL >= 0)[None]
        if self.window is not None:
            seen_BLL = seen_BLL & (behind_LL < self.window)
        if self.segments_BL is not None:
            seen_BLL = seen_BLL & (self.segments_BL[:, :, None] == self.segments_BL[:, None, :])
        return seen_BLL[:, None]


class AttentionPlugin(Plugin):
    """Called by the model in every block, in forward and again where activations are recomputed."""

    kind: ClassVar[str] = "attention"
    hf_name: ClassVar[str] = ""
    """What transformers calls the same computation (``attn_implementation``), for models whose attention is transformers' own; empty
    where it has none."""

    def check(self, model: CausalLM, spec: StepSpec) -> None:
        """Refuse what cannot be computed, before any rank starts. ``model`` is on the meta device; the ranks' devices may be elsewhere.

        Raises:
            UserError: with what would work.
        """

    @abstractmethod
    def plan(self, pattern: Pattern, device: torch.device) -> Any:
        """What :meth:`attend` needs to know of a pattern, made once per forward for all blocks that share it: a mask, offsets, or None."""

    @abstractmethod
    def attend(
        self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, plan: Any, *, scale: float, softcap: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """``softmax(c · tanh(scale · q kᵀ / c)) v`` over the positions seen, query heads in groups; without c, ``softmax(scale · q kᵀ) v``.

        Args:
            q_BNLH: batch, query heads N, length L, head dimension H.
            k_BKLH: as q with K key heads, where K divides N; query head n attends to key head n // (N // K).
            v_BKLH: as k.
            plan: from :meth:`plan` for this batch.
            softcap: c, the bound of the scores (Gemma 2, https://arxiv.org/abs/2408.00118).
            dropout: probability with which an attention weight is dropped; 0 outside training.

        Returns:
            ``[B, N, L, H]`` in q's dtype.
        """
