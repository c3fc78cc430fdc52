"""Attention written out: the reference the others are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import AttentionPlugin, Pattern


class EagerAttention(AttentionPlugin):
    """Attention in plain tensor operations: the reference. Takes heads · length² · 4 bytes per sequence and block."""

    api = 1
    hf_name = "eager"

    def plan(self, pattern: Pattern, device: torch.device) -> Tensor:
        """The mask, ``[B or 1, 1, L, L]``."""
        return pattern.seen(device)

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        plan: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As the contract says; the softmax is taken in fp32."""
        group = q_BNLH.shape[1] // k_BKLH.shape[1]
        k_BNLH, v_BNLH = k_BKLH.repeat_interleave(group, 1), v_BKLH.repeat_interleave(group, 1)
        scores_BNLL = q_BNLH @ k_BNLH.transpose(-1, -2) * scale
        if softcap is not None:
            scores_BNLL = softcap * torch.tanh(scores_BNLL / softcap)
        scores_BNLL = scores_BNLL.masked_fill(~plan, float("-inf"))
        weights_BNLL = scores_BNLL.float().softmax(-1).to(v_BNLH.dtype)
        return (F.dropout(weights_BNLL, dropout) if dropout else weights_BNLL) @ v_BNLH
