"""Llama, trained from random weights or resumed."""

from __future__ import annotations

from typing import Any

from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, ModelPlugin
from fw_models.llama import Llama, LlamaConfig


class LlamaModel(ModelPlugin):
    """Llama 2/3 architecture of any shape: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    api = 1
    Config = LlamaConfig
    config: LlamaConfig

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding, or None to take the tokenizer's."""
        return self.config.vocab_size

    def build(self, vocab_size: int, attention: AttentionPlugin) -> CausalLM:
        """The model on the current device."""
        return Llama(self.config, vocab_size, attention)

    def hf_config(self, vocab_size: int, sequence_length: int) -> dict[str, Any]:
        """``config.json`` of ``LlamaForCausalLM``."""
        c = self.config
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "num_hidden_layers": c.num_hidden_layers,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_size,
            "intermediate_size": c.intermediate_size,
            "vocab_size": vocab_size,
            "max_position_embeddings": c.max_position_embeddings or sequence_length,
            "rope_theta": c.rope_theta,
            "rms_norm_eps": c.rms_norm_eps,
            "tie_word_embeddings": c.tie_word_embeddings,
            "initializer_range": c.initializer_range,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
