"""Gemma in its published shapes."""

from __future__ import annotations

from fw_models.gemma2 import Gemma2Config
from fw_models.gemma3 import Gemma3Config
from fw_plugins.model.gemma2 import Gemma2Model
from fw_plugins.model.gemma3 import Gemma3Model
from fw_plugins.model.reference import preset

_GEMMA2 = {"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096}


class Gemma2_2B(Gemma2Model):
    """Gemma 2 2B (https://huggingface.co/google/gemma-2-2b)."""

    Config = preset(
        Gemma2Config,
        **_GEMMA2,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
    )


class Gemma2_9B(Gemma2Model):
    """Gemma 2 9B (https://huggingface.co/google/gemma-2-9b)."""

    Config = preset(
        Gemma2Config,
        **_GEMMA2,
        hidden_size=3584,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        intermediate_size=14336,
    )


class Gemma3_1B(Gemma3Model):
    """Gemma 3 1B (https://huggingface.co/google/gemma-3-1b-pt)."""

    Config = preset(
        Gemma3Config,
        vocab_size=262144,
        hidden_size=1152,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=6912,
        max_position_embeddings=32768,
        sliding_window=512,
    )
