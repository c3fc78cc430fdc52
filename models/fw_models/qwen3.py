"""Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388): queries and keys normalised per head, heads of any size, no biases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from fw_models.decoder import Decoder
from fw_models.hf_config import HFNames
from fw_models.layers import AttentionShape, RMSNorm
from fw_models.qwen2 import DEFAULTS, DERIVED, Qwen2Config, read_windows, write_windows


@dataclass
class Qwen3Config(Qwen2Config):
    """Qwen3, dense."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    attention_bias: bool = False
    """Biases in all four projections of attention."""

    def attention_shape(self) -> AttentionShape:
        """With norms of queries and keys."""
        norm = partial(RMSNorm, eps=self.rms_norm_eps)
        return dataclasses.replace(super().attention_shape(), bias=self.attention_bias, output_bias=self.attention_bias, norm=norm)


class Qwen3(Decoder):
    """Qwen3."""

    config: Qwen3Config
    hf = HFNames(
        "qwen3", "Qwen3ForCausalLM", {**DEFAULTS, "head_dim": 128}, {"hidden_act": "silu"}, read_windows, write_windows, derived=DERIVED
    )
