"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2307.09288): RMSNorm, RoPE, grouped-query attention, SwiGLU.

Shape suffixes as in :mod:`fw_models.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.errors import UserError
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, Init, Readout
from fw_models.layers import Attention, GatedMLP, RMSNorm, rope_angles
from fw_models.llama_names import to_hf


@dataclass
class LlamaConfig:
    """The shape of a Llama, with Hugging Face's names. Parameters: about 12 · layers · hidden² plus vocabulary · hidden."""

    hidden_size: int = 512
    """Width of the residual stream. Parameters grow with its square, activations in proportion."""
    num_hidden_layers: int = 8
    """Transformer blocks. Parameters and activations grow in proportion."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; divides the query heads. Empty for as many as those. The KV cache grows in proportion."""
    head_dim: int | None = None
    """Dimensions per head, even; empty for hidden_size ÷ num_attention_heads."""
    intermediate_size: int = 1376
    """Width of the feed-forward network. Parameters and activations grow in proportion."""
    vocab_size: int | None = None
    """Rows of the embedding; may exceed the tokenizer's. Empty for the tokenizer's. Logits take vocab_size × 4 bytes per token."""
    max_position_embeddings: int | None = None
    """Longest context the model claims to serve; empty for train.sequence_length. No effect on memory."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = False
    """Use the embedding as output head too: saves vocab_size · hidden_size parameters, gradients and optimizer state."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    depth_scaled_init: bool = True
    """Divide it by sqrt(2 · layers) for the two projections of a block that add to the residual stream (GPT-2)."""

    def __post_init__(self) -> None:
        shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        for name in (*shape, "vocab_size", "max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name}: {value} is too small; the least is 1")
        if self.rope_theta <= 0 or self.rms_norm_eps < 0 or self.initializer_range < 0:
            raise UserError("model.rope_theta must be above 0, model.rms_norm_eps and model.initializer_range not below")
        if self.num_attention_heads % self.kv_heads:
            raise UserError(f"model.num_key_value_heads: {self.kv_heads} does not divide num_attention_heads {self.num_attention_heads}")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.num_attention_heads: {self.num_attention_heads} does not divide hidden_size {self.hidden_size}; set model.head_dim"
            )
        if self.head_size % 2:
            raise UserError(f"model.head_dim: {self.head_size} is odd; rotary embedding turns pairs")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Dimensions per head, the default filled in."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class LlamaBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: LlamaConfig, attention: AttentionPlugin) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BLD: Tensor, cos_B1LH: Tensor, sin_B1LH: Tensor) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_B1LH, sin_B1LH)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))


class Llama(CausalLM):
    """The whole model: embedding, blocks, final norm, head."""

    def __init__(self, config: LlamaConfig, vocab_size: int, attention: AttentionPlugin) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config, attention) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order."""
        return list(self.layers)

    def forward(self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, readout: Readout | None = None) -> Tensor:
        """Logits ``[B, L, V]``, or what ``readout`` makes of the hidden states."""
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
        cos_B1LH, sin_B1LH = rope_angles(positions_BL, self.config.head_size, self.config.rope_theta)
        x_BLD = self.embed_tokens(ids_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_B1LH, sin_B1LH)
        x_BLD = self.norm(x_BLD)
        return self._head(x_BLD) if readout is None else readout(x_BLD, self._head)

    def _head(self, x_BLD: Tensor) -> Tensor:
        # Tied weights are one parameter used twice, never two names for one: nothing to keep in step when it is sharded or loaded.
        if self.lm_head is None:
            return F.linear(x_BLD, self.embed_tokens.weight)
        return self.lm_head(x_BLD)

    def init(self, name: str) -> Init:
        """Normal weights; norms start at one."""
        if "norm" in name:
            return Init(value=1.0)
        std = self.config.initializer_range
        if self.config.depth_scaled_init and name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        return Init(std=std)

    def undecayed(self) -> frozenset[str]:
        """Norms and the embedding, also where it serves as head."""
        return frozenset(name for name, _ in self.named_parameters() if "norm" in name or name.startswith("embed_tokens"))

    def flops_per_token(self, sequence_length: int) -> float:
        """``6 · (parameters in matrix products) + 12 · layers · heads · head_dim · length``.

        Chowdhery et al. 2022, appendix B (https://arxiv.org/abs/2204.02311): 2 per multiply-add, forward once and backward twice; the
        attention product is counted in full, as there, though half of it is masked. Looking up an embedding is no product.
        """
        products = sum(p.numel() for name, p in self.named_parameters() if "norm" not in name)
        if self.lm_head is not None:
            products -= self.embed_tokens.weight.numel()
        width = self.config.num_attention_heads * self.config.head_size
        return 6.0 * products + 12.0 * self.config.num_hidden_layers * width * sequence_length

    def hf_name(self, name: str) -> str:
        """As in :mod:`fw_models.llama_names`."""
        return to_hf(name)
