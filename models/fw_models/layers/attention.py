"""Self-attention with grouped query heads and rotary positions; the attention product itself comes from a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fw.api import AttentionPlugin
from fw_models.layers.prefix import attend
from fw_models.layers.rope import Angles, rotate


@dataclass(frozen=True)
class AttentionShape:
    """What differs between attentions.

    Attributes:
        scale: of the scores; None for 1/√head_dim.
        softcap: bound of the scores; None for none.
        dropout: of the attention weights, in training.
        bias, output_bias: whether the projections before and after attention have one.
        norm: makes a norm over a head's dimensions, for queries and keys; None for none.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    bias: bool = False
    output_bias: bool = False
    norm: Callable[[int], nn.Module] | None = None


class Attention(nn.Module):
    """Causal self-attention, N query heads on K key/value heads (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, shape: AttentionShape, attention: AttentionPlugin) -> None:
        super().__init__()
        self.shape = shape
        self.attention = attention
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=shape.output_bias)
        self.q_norm = shape.norm(shape.head_dim) if shape.norm else None
        self.k_norm = shape.norm(shape.head_dim) if shape.norm else None

    def forward(self, x_BLD: Tensor, angles: Angles, plan: Any) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``; ``plan`` is the attention plugin's for this batch and window."""
        q_BLNH, k_BLKH = self._heads(self.q_proj(x_BLD)), self._heads(self.k_proj(x_BLD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BNLH, k_BKLH = rotate(q_BLNH.transpose(1, 2), angles), rotate(k_BLKH.transpose(1, 2), angles)
        v_BKLH = self._heads(self.v_proj(x_BLD)).transpose(1, 2)
        dropout = self.shape.dropout if self.training else 0.0
        how = {"scale": self.scale, "softcap": self.shape.softcap, "dropout": dropout}
        out_BNLH = attend(self.attention, q_BNLH, k_BKLH, v_BKLH, plan, **how)
        return self.o_proj(out_BNLH.transpose(1, 2).flatten(2))

    def _heads(self, x_BLE: Tensor) -> Tensor:
        return x_BLE.unflatten(-1, (-1, self.shape.head_dim))
