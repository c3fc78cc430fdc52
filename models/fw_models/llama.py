"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2307.09288): RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fw_models.decoder import Block, Decoder
from fw_models.decoder_config import DecoderConfig
from fw_models.hf_config import HFNames, read_rope
from fw_models.layers import Attention, AttentionShape, GatedMLP


@dataclass
class LlamaConfig(DecoderConfig):
    """Llama 2, 3, 3.1, 3.2, TinyLlama. Parameters: about 12 · layers · hidden² plus vocabulary · hidden."""

    whole_heads: ClassVar[bool] = True
    attention_bias: bool = False
    """Biases in all four projections of attention."""
    mlp_bias: bool = False
    """Biases in the three projections of the feed-forward network."""

    def attention_shape(self) -> AttentionShape:
        """With biases where asked for."""
        return dataclasses.replace(super().attention_shape(), bias=self.attention_bias, output_bias=self.attention_bias)


class Llama(Decoder):
    """Llama 2 and 3."""

    config: LlamaConfig
    hf = HFNames(
        "llama",
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
        {"hidden_act": "silu"},
        read_rope,
    )

    def block(self, layer: int) -> nn.Module:
        """As the base, with biases where asked for."""
        c = self.config
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        return Block(c, Attention(c.attention_shape(), self.attention), mlp)
