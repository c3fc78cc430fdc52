"""Self-attention with grouped query heads and rotary positions; the attention product itself comes from a plugin."""

from __future__ import annotations

from torch import Tensor, nn

from fw.kinds.attention import AttentionPlugin
from fw_models.layers.rope import rotate


class Attention(nn.Module):
    """Causal self-attention, N query heads on K key/value heads (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, attention: AttentionPlugin) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention = attention
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)

    def forward(self, x_BLD: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        q_BNLH = rotate(self._heads(self.q_proj(x_BLD)), cos_B1LH, sin_B1LH)
        k_BKLH = rotate(self._heads(self.k_proj(x_BLD)), cos_B1LH, sin_B1LH)
        v_BKLH = self._heads(self.v_proj(x_BLD))
        out_BNLH = self.attention.attend(q_BNLH, k_BKLH, v_BKLH, causal=True)
        return self.o_proj(out_BNLH.transpose(1, 2).flatten(2))

    def _heads(self, x_BLE: Tensor) -> Tensor:
        return x_BLE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
