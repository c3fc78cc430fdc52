"""The contract of ``attention``: how queries, keys and values become outputs."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from fw.registry import Plugin


class AttentionPlugin(Plugin):
    """Called by the model in every block, in forward and again where activations are recomputed."""

    kind: ClassVar[str] = "attention"

    @abstractmethod
    def attend(self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, *, causal: bool = True) -> Tensor:
        """Softmax(q kᵀ / √H) v with grouped-query heads.

        Args:
            q_BNLH: batch, query heads N, length L, head dimension H.
            k_BKLH: as q with K key heads, where K divides N; query head n attends to key head n // (N // K).
            v_BKLH: as k.
            causal: each position sees itself and those before it.

        Returns:
            ``[B, N, L, H]`` in q's dtype.
        """
