"""Qwen2 and Qwen2.5 (Yang et al. 2024, https://arxiv.org/abs/2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fw_models.decoder import Decoder
from fw_models.decoder_config import DecoderConfig, check_layer_types, full_windows
from fw_models.hf_config import HFNames, read_rope
from fw_models.layers import AttentionShape

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Transformers' for absent fields."""


DERIVED = {"layer_types": ("use_sliding_window", "max_window_layers", "sliding_window")}
"""Written by transformers 5 from the fields named."""


@dataclass
class Qwen2Config(DecoderConfig):
    """Qwen2 and Qwen2.5, dense."""

    sliding_window: int | None = None
    """Positions a token sees in the blocks that layer_types says; empty for all."""
    layer_types: list[str] | None = None
    """`sliding_attention` or `full_attention` for each block; empty for full_attention everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)

    def window(self, layer: int) -> int | None:
        """By layer_types."""
        return full_windows(self.layer_types, self.sliding_window, layer) if self.layer_types else None

    def attention_shape(self) -> AttentionShape:
        """Biases before attention, none after."""
        return dataclasses.replace(super().attention_shape(), bias=True)


def read_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """``use_sliding_window``, ``max_window_layers`` and ``sliding_window`` as ``layer_types``."""
    fields = read_rope(fields)
    used, first, window = (fields.pop(key, None) for key in ("use_sliding_window", "max_window_layers", "sliding_window"))
    if used and window is not None:
        fields["sliding_window"] = window
        if "layer_types" not in fields:
            layers = range(fields["num_hidden_layers"])
            fields["layer_types"] = ["sliding_attention" if layer >= (first or 0) else "full_attention" for layer in layers]
    elif "sliding_attention" not in fields.get("layer_types", []):
        fields.pop("layer_types", None)
    return fields


def write_windows(fields: dict[str, Any]) -> dict[str, Any]:
    """Both ways of saying it: old versions of transformers know no ``layer_types``."""
    types = fields.get("layer_types") or []
    used = fields.get("sliding_window") is not None and "sliding_attention" in types
    first = types.index("sliding_attention") if used else len(types)
    return {**fields, "use_sliding_window": used, "max_window_layers": first}


class Qwen2(Decoder):
    """Qwen2 and Qwen2.5."""

    config: Qwen2Config
    hf = HFNames("qwen2", "Qwen2ForCausalLM", DEFAULTS, {"hidden_act": "silu"}, read_windows, write_windows, derived=DERIVED)
