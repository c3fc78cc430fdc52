"""Gemma 3, text (Gemma Team 2025, https://arxiv.org/abs/2503.19786): Gemma 2 with normalised queries and keys, no capped scores, five
sliding blocks for every full one, and a rotary base of its own for either."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fw.api import UserError
from fw_models.gemma2 import DEFAULTS, Gemma2, Gemma2Config
from fw_models.hf_config import HFNames, read_rope, read_scaling
from fw_models.layers import AttentionShape, Rope

_PATTERN = 6
"""Every sixth block sees everything."""


@dataclass
class Gemma3Config(Gemma2Config):
    """Gemma 3, text."""

    rope_theta: float = 1000000.0
    """Base of the rotary frequencies in blocks that see everything."""
    rope_local_base_freq: float = 10000.0
    """Base of the rotary frequencies in sliding blocks, which are never stretched."""
    layer_types: list[str] | None = None
    """`sliding_attention` or `full_attention` for each block; empty for five sliding ones before each full one."""
    attn_logit_softcapping: float | None = None
    """Bound of the attention scores; empty for none. With it, no fused kernel serves: heads · length² · 4 bytes per sequence and block."""
    final_logit_softcapping: float | None = None
    """Bound of the logits; empty for none."""

    def sliding(self, layer: int) -> bool:
        """Whether block ``layer`` sees only a window back."""
        return self.layer_types[layer] == "sliding_attention" if self.layer_types else (layer + 1) % _PATTERN != 0

    def rope(self, layer: int) -> Rope:
        """Sliding blocks have their own base."""
        return Rope(self.head_size, self.rope_local_base_freq) if self.sliding(layer) else super().rope(layer)

    def attention_shape(self) -> AttentionShape:
        """With norms of queries and keys."""
        return dataclasses.replace(super().attention_shape(), norm=self.norm())


def _canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """The two ropes of ``rope_parameters`` as ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``."""
    fields = dict(fields)
    fields.pop("_sliding_window_pattern", None)  # written by transformers 5 beside layer_types, and not read by it
    both, old = fields.pop("rope_parameters", None) or {}, fields.pop("rope_scaling", None)
    if unknown := sorted(set(both) - {"full_attention", "sliding_attention"}):
        raise UserError(f"config.json: rope_parameters of this architecture are full_attention and sliding_attention, not {unknown[0]}")
    if old is not None and "rope_type" not in old:
        raise UserError("config.json: rope_scaling without rope_type, which transformers does not follow in this architecture")
    whole, local = dict(both.get("full_attention") or {}), dict(both.get("sliding_attention") or {})
    whole.update(old or {})
    for key, section in (("rope_theta", whole), ("rope_local_base_freq", local)):
        if "rope_theta" in section:
            fields[key] = section.pop("rope_theta")
    if read_scaling(local) is not None:
        raise UserError(f"config.json: rope_parameters.sliding_attention is stretched ({local}), which is not honoured")
    return {**fields, "rope_scaling": whole} if both or old else fields


def _reading(fields: dict[str, Any]) -> dict[str, Any]:
    fields = read_rope(fields)
    pattern = fields.pop("sliding_window_pattern", None)
    if pattern not in (None, _PATTERN) and "layer_types" not in fields:
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in layers]
    return fields


class Gemma3(Gemma2):
    """Gemma 3, text."""

    config: Gemma3Config
    hf = HFNames(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **{k: v for k, v in DEFAULTS.items() if not k.endswith("softcapping")},
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
        _reading,
        canonical=_canonical,
        derived={"layer_types": ("sliding_window_pattern",)},
    )
