"""Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118): scaled embeddings, GeGLU, norms on both sides of each layer, capped
scores and logits, every second block seeing only a window back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fw.api import Init, UserError
from fw_models.decoder import Decoder
from fw_models.decoder_config import DecoderConfig, check_layer_types
from fw_models.hf_config import HFNames, read_rope
from fw_models.layers import Angles, Attention, AttentionShape, GatedMLP, ShiftedRMSNorm

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""Transformers' for absent fields."""


@dataclass
class Gemma2Config(DecoderConfig):
    """Gemma 2."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = True
    """Use the embedding as output head too: saves vocab_size · hidden_size parameters, gradients and optimizer state."""
    depth_scaled_init: bool = False
    """Divide it by sqrt(2 · layers) for the two projections of a block that add to the residual stream; norms after them undo it."""
    whole_heads: ClassVar[bool] = True
    attention_bias: bool = False
    """Biases in all four projections of attention."""
    query_pre_attn_scalar: int = 256
    """Scores are divided by its square root."""
    sliding_window: int | None = 4096
    """Positions a token sees in sliding blocks, itself included."""
    layer_types: list[str] | None = None
    """`sliding_attention` or `full_attention` for each block; empty for them in turns, sliding first."""
    attn_logit_softcapping: float | None = 50.0
    """Bound of the attention scores; empty for none. With it, no fused kernel serves: heads · length² · 4 bytes per sequence and block."""
    final_logit_softcapping: float | None = 30.0
    """Bound of the logits; empty for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        if self.sliding_window is None and any(self.sliding(layer) for layer in range(self.num_hidden_layers)):
            raise UserError("model.sliding_window: blocks that see only a window back need one; set it, or model.layer_types")
        if self.query_pre_attn_scalar < 1:
            raise UserError(f"model.query_pre_attn_scalar: {self.query_pre_attn_scalar} is too small; the least is 1")

    def sliding(self, layer: int) -> bool:
        """Whether block ``layer`` sees only a window back."""
        return self.layer_types[layer] == "sliding_attention" if self.layer_types else layer % 2 == 0

    def window(self, layer: int) -> int | None:
        """By layer_types."""
        return self.sliding_window if self.sliding(layer) else None

    def attention_shape(self) -> AttentionShape:
        """Scores scaled and capped as configured."""
        return dataclasses.replace(
            super().attention_shape(),
            scale=self.query_pre_attn_scalar**-0.5,
            softcap=self.attn_logit_softcapping,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
        )

    def norm(self) -> Callable[[int], nn.Module]:
        """Makes a norm of a size."""
        return partial(ShiftedRMSNorm, eps=self.rms_norm_eps)


def _reading(fields: dict[str, Any]) -> dict[str, Any]:
    fields = read_rope(fields)
    if fields.get("sliding_window_size") == fields.get("sliding_window"):  # some published files say it twice
        fields.pop("sliding_window_size", None)
    return fields


class SandwichBlock(nn.Module):
    """``x + norm(attention(norm(x)))``, then ``x + norm(mlp(norm(x)))``."""

    def __init__(self, config: Gemma2Config, attention: Attention) -> None:
        super().__init__()
        norm = config.norm()
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size)
        self.pre_feedforward_layernorm = norm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation="gelu_pytorch_tanh")
        self.post_feedforward_layernorm = norm(config.hidden_size)

    def forward(self, x_BLD: Tensor, angles: Angles, plan: Any) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        x_BLD = x_BLD + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_BLD), angles, plan))
        return x_BLD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_BLD)))


class Gemma2(Decoder):
    """Gemma 2."""

    config: Gemma2Config
    hf = HFNames(
        "gemma2",
        "Gemma2ForCausalLM",
        DEFAULTS,
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
        _reading,
    )

    def block(self, layer: int) -> nn.Module:
        """Norms on both sides."""
        return SandwichBlock(self.config, Attention(self.config.attention_shape(), self.attention))

    def final_norm(self) -> nn.Module:
        """As the blocks' norms."""
        return self.config.norm()(self.config.hidden_size)

    def embed(self, ids_BL: Tensor) -> Tensor:
        """Scaled by √D, a number that is first rounded to the embedding's dtype."""
        x_BLD: Tensor = self.embed_tokens(ids_BL)
        return x_BLD * torch.full((), self.config.hidden_size**0.5, dtype=x_BLD.dtype, device=x_BLD.device)

    @property
    def final_softcap(self) -> float | None:
        """As configured."""
        return self.config.final_logit_softcapping

    def init(self, name: str) -> Init:
        """Norms start at zero: they multiply with one more than their weight."""
        return Init(value=0.0) if "norm" in name else super().init(name)
