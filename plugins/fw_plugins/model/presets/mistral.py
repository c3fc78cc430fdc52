"""Mistral and Mixtral in their published shapes."""

from __future__ import annotations

from fw_models.mistral import MistralConfig
from fw_models.mixtral import MixtralConfig
from fw_plugins.model.mistral import MistralModel
from fw_plugins.model.mixtral import MixtralModel
from fw_plugins.model.reference import preset

_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
}


class Mistral7B(MistralModel):
    """Mistral 7B v0.1 (https://huggingface.co/mistralai/Mistral-7B-v0.1)."""

    Config = preset(MistralConfig, **_7B, sliding_window=4096)


class Mixtral8x7B(MixtralModel):
    """Mixtral 8x7B (https://huggingface.co/mistralai/Mixtral-8x7B-v0.1)."""

    Config = preset(MixtralConfig, **_7B, rope_theta=1000000.0, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02)
