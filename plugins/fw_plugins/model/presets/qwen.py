"""Qwen in its published shapes."""

from __future__ import annotations

from fw_models.qwen2 import Qwen2Config
from fw_models.qwen3 import Qwen3Config
from fw_models.qwen3_moe import Qwen3MoEConfig
from fw_plugins.model.qwen2 import Qwen2Model
from fw_plugins.model.qwen3 import Qwen3Model
from fw_plugins.model.qwen3_moe import Qwen3MoEModel
from fw_plugins.model.reference import preset

_QWEN25 = {"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}


class Qwen25_05B(Qwen2Model):
    """Qwen2.5 0.5B (https://huggingface.co/Qwen/Qwen2.5-0.5B)."""

    Config = preset(
        Qwen2Config,
        **_QWEN25,
        vocab_size=151936,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    )


class Qwen25_7B(Qwen2Model):
    """Qwen2.5 7B Instruct (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct)."""

    Config = preset(
        Qwen2Config,
        **_QWEN25,
        vocab_size=152064,
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
    )


class Qwen3_06B(Qwen3Model):
    """Qwen3 0.6B (https://huggingface.co/Qwen/Qwen3-0.6B)."""

    Config = preset(
        Qwen3Config,
        **_QWEN3,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )


class Qwen3_17B(Qwen3Model):
    """Qwen3 1.7B (https://huggingface.co/Qwen/Qwen3-1.7B)."""

    Config = preset(
        Qwen3Config,
        **_QWEN3,
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=6144,
        tie_word_embeddings=True,
    )


class Qwen3_4B(Qwen3Model):
    """Qwen3 4B (https://huggingface.co/Qwen/Qwen3-4B)."""

    Config = preset(
        Qwen3Config,
        **_QWEN3,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=9728,
        tie_word_embeddings=True,
    )


class Qwen3_8B(Qwen3Model):
    """Qwen3 8B (https://huggingface.co/Qwen/Qwen3-8B)."""

    Config = preset(Qwen3Config, **_QWEN3, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288)


class Qwen3_14B(Qwen3Model):
    """Qwen3 14B (https://huggingface.co/Qwen/Qwen3-14B)."""

    Config = preset(Qwen3Config, **_QWEN3, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17408)


class Qwen3_32B(Qwen3Model):
    """Qwen3 32B (https://huggingface.co/Qwen/Qwen3-32B)."""

    Config = preset(Qwen3Config, **_QWEN3, hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600)


class Qwen3_30B_A3B(Qwen3MoEModel):
    """Qwen3 30B with 3B active (https://huggingface.co/Qwen/Qwen3-30B-A3B)."""

    Config = preset(
        Qwen3MoEConfig,
        **{**_QWEN3, "num_key_value_heads": 4},
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )
