"""Attention written out: the reference the others are tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fw.kinds.attention import AttentionPlugin


class EagerAttention(AttentionPlugin):
    """Attention in plain tensor operations: the reference. Takes heads · length² · 4 bytes per sequence and block."""

    api = 1

    def attend(self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, *, causal: bool = True) -> Tensor:
        """As the contract says; the softmax is taken in fp32."""
        group = q_BNLH.shape[1] // k_BKLH.shape[1]
        k_BNLH, v_BNLH = k_BKLH.repeat_interleave(group, 1), v_BKLH.repeat_interleave(group, 1)
        scores_BNLL = q_BNLH @ k_BNLH.transpose(-1, -2) / math.sqrt(q_BNLH.shape[-1])
        if causal:
            length = q_BNLH.shape[2]
            future_LL = torch.ones(length, length, dtype=torch.bool, device=q_BNLH.device).triu(1)
            scores_BNLL = scores_BNLL.masked_fill(future_LL, float("-inf"))
        return scores_BNLL.float().softmax(-1).to(v_BNLH.dtype) @ v_BNLH
