"""torch's scaled_dot_product_attention, and on a CPU fw's own kernel where it applies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import AttentionPlugin, Pattern, is_gpu, on_gpu
from fw.api.kernels import causal
from fw_plugins.attention.eager import EagerAttention


class _Unwritten:
    """A pattern that a kernel may read as it is; else its mask, made once for all blocks."""

    def __init__(self, pattern: Pattern, device: torch.device) -> None:
        self.pattern, self._device = pattern, device
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        """Bool ``[B or 1, 1, L, L]``."""
        if self._mask is None:
            self._mask = self.pattern.seen(self._device)
        return self._mask


class SDPAttention(AttentionPlugin):
    """torch's fused attention: no scores in memory; windows and documents take a mask of length² bytes; capped scores are eager.

    On a CPU fw's own kernel, without dropout: neither scores nor masks, three to five times as fast.
    """

    api = 1
    hf_name = "sdpa"

    def plan(self, pattern: Pattern, device: torch.device) -> Tensor | _Unwritten | None:
        """None where order is all that matters, for which the kernels need no mask; else ``[B or 1, 1, L, L]``, or what it is made of."""
        kernel = device.type == "cpu" and not is_gpu(device) and causal.available()  # asked here, where nothing is being compiled
        if pattern.causal_only:
            return None
        return _Unwritten(pattern, device) if kernel else pattern.seen(device)

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        plan: Tensor | _Unwritten | None,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As the contract says; keys and values are not expanded in memory where the kernel takes groups. No kernel caps scores."""
        if not isinstance(plan, Tensor) and not dropout and causal.takes(q_BNLH, k_BKLH, v_BKLH):
            how: dict[str, Any] = {"scale": scale, "softcap": softcap}
            if plan is not None:
                how |= {"window": plan.pattern.window, "segments_BL": plan.pattern.segments_BL}
            return causal.attend(q_BNLH, k_BKLH, v_BKLH, **how)
        if isinstance(plan, _Unwritten):
            plan = plan.mask()
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
