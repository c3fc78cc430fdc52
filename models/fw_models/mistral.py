"""Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825): Llama, seeing only a window back."""

from __future__ import annotations

from dataclasses import dataclass

from fw_models.decoder import Decoder
from fw_models.decoder_config import DecoderConfig
from fw_models.hf_config import HFNames, read_rope


@dataclass
class MistralConfig(DecoderConfig):
    """Mistral 7B and its kin."""

    sliding_window: int | None = None
    """Positions a token sees, itself included; empty for all. Bounds the KV cache."""

    def window(self, layer: int) -> int | None:
        """The same for every block."""
        return self.sliding_window


class Mistral(Decoder):
    """Mistral."""

    config: MistralConfig
    hf = HFNames(
        "mistral",
        "MistralForCausalLM",
        {
            "vocab_size": 32000,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
        {"hidden_act": "silu"},
        read_rope,
    )
