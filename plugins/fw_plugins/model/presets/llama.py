"""Llama in its published shapes."""

from __future__ import annotations

from fw_models.layers import RopeScaling
from fw_models.llama import LlamaConfig
from fw_plugins.model.llama import LlamaModel
from fw_plugins.model.reference import preset

_LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "num_key_value_heads": 8, "max_position_embeddings": 8192}


def _stretched(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0)


_LLAMA31 = {**_LLAMA3, "max_position_embeddings": 131072, "rope_scaling": _stretched(8.0)}
_LLAMA32 = {**_LLAMA3, "max_position_embeddings": 131072, "rope_scaling": _stretched(32.0), "tie_word_embeddings": True}
_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}


class TinyLlama1B(LlamaModel):
    """TinyLlama 1.1B (https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0)."""

    Config = preset(
        LlamaConfig,
        vocab_size=32000,
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        max_position_embeddings=2048,
    )


class Llama2_7B(LlamaModel):
    """Llama 2 7B (https://huggingface.co/meta-llama/Llama-2-7b-hf)."""

    Config = preset(
        LlamaConfig,
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=11008,
        max_position_embeddings=4096,
    )


class Llama3_8B(LlamaModel):
    """Llama 3 8B (https://huggingface.co/meta-llama/Meta-Llama-3-8B)."""

    Config = preset(LlamaConfig, **_LLAMA3, **_8B)


class Llama3_70B(LlamaModel):
    """Llama 3 70B (https://huggingface.co/meta-llama/Meta-Llama-3-70B)."""

    Config = preset(LlamaConfig, **_LLAMA3, **_70B)


class Llama3_405B(LlamaModel):
    """Llama 3.1 405B (https://huggingface.co/meta-llama/Llama-3.1-405B)."""

    Config = preset(LlamaConfig, **_LLAMA31, hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, intermediate_size=53248)


class Llama31_8B(LlamaModel):
    """Llama 3.1 8B (https://huggingface.co/meta-llama/Llama-3.1-8B)."""

    Config = preset(LlamaConfig, **_LLAMA31, **_8B)


class Llama31_70B(LlamaModel):
    """Llama 3.1 70B (https://huggingface.co/meta-llama/Llama-3.1-70B)."""

    Config = preset(LlamaConfig, **_LLAMA31, **_70B)


class Llama32_1B(LlamaModel):
    """Llama 3.2 1B (https://huggingface.co/meta-llama/Llama-3.2-1B)."""

    Config = preset(LlamaConfig, **_LLAMA32, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, intermediate_size=8192)


class Llama32_3B(LlamaModel):
    """Llama 3.2 3B (https://huggingface.co/meta-llama/Llama-3.2-3B)."""

    Config = preset(LlamaConfig, **_LLAMA32, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, intermediate_size=8192)
