"""torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fw.kinds.attention import AttentionPlugin


class SDPAttention(AttentionPlugin):
    """torch's fused attention: flash or memory-efficient kernels where the device has them, O(length) memory."""

    api = 1

    def attend(self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, *, causal: bool = True) -> Tensor:
        """As the contract says; keys and values are not expanded in memory where the kernel takes groups."""
        grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
        return F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, is_causal=causal, enable_gqa=grouped)
