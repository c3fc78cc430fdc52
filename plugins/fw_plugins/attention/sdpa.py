"""torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import AttentionPlugin, Pattern, on_gpu
from fw_plugins.attention.eager import EagerAttention


class SDPAttention(AttentionPlugin):
    """torch's fused attention: no scores in memory; windows and documents take a mask of length² bytes; capped scores are eager."""

    api = 1
    hf_name = "sdpa"

    def plan(self, pattern: Pattern, device: torch.device) -> Tensor | None:
        """None where order is all that matters, for which the kernels need no mask; else ``[B or 1, 1, L, L]``."""
        return None if pattern.causal_only else pattern.seen(device)

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        plan: Tensor | None,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As the contract says; keys and values are not expanded in memory where the kernel takes groups. No kernel caps scores."""
        if softcap is not None:
            seen = Pattern(q_BNLH.shape[2]).seen(q_BNLH.device) if plan is None else plan
            return EagerAttention(None).attend(q_BNLH, k_BKLH, v_BKLH, seen, scale=scale, softcap=softcap, dropout=dropout)
        grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
        if grouped and plan is not None and on_gpu(q_BNLH):
            # With a mask, no fused CUDA kernel takes groups: the call would write out all scores. Repeated keys are the smaller price.
            group = q_BNLH.shape[1] // k_BKLH.shape[1]
            k_BKLH, v_BKLH = k_BKLH.repeat_interleave(group, 1), v_BKLH.repeat_interleave(group, 1)
            grouped = False
        return F.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, attn_mask=plan, is_causal=plan is None, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
