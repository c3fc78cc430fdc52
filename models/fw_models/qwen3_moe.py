"""Qwen3 with a mixture of experts (Yang et al. 2025, https://arxiv.org/abs/2505.09388); blocks may go without."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from fw.api import HFTensor, UserError
from fw_models.decoder import Block
from fw_models.hf_config import HFNames, one_rope, read_rope
from fw_models.layers import Attention, AttentionShape, GatedMLP, MoE, RMSNorm
from fw_models.mistral import MistralConfig
from fw_models.mixtral import ExpertsConfig, ExpertsDecoder
from fw_models.qwen2 import DEFAULTS


@dataclass
class Qwen3MoEConfig(ExpertsConfig, MistralConfig):
    """Qwen3, mixture of experts."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    attention_bias: bool = False
    """Biases in all four projections of attention."""
    num_experts: int = 128
    """Experts per block."""
    num_experts_per_tok: int = 8
    """Experts a token is sent to. Activations of the feed-forward network grow in proportion."""
    moe_intermediate_size: int = 768
    """Width of an expert; intermediate_size is that of blocks without experts."""
    norm_topk_prob: bool = True
    """Make the chosen experts' probabilities add up to one."""
    decoder_sparse_step: int = 1
    """Every so manyth block has experts."""
    mlp_only_layers: list[int] = field(default_factory=list)
    """Blocks without experts besides, counted from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_experts(self.num_experts)
        for name in ("moe_intermediate_size", "decoder_sparse_step"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}: {getattr(self, name)} is too small; the least is 1")
        if outside := [layer for layer in self.mlp_only_layers if not 0 <= layer < self.num_hidden_layers]:
            raise UserError(f"model.mlp_only_layers: there is no block {outside[0]} among {self.num_hidden_layers}, counted from 0")

    def attention_shape(self) -> AttentionShape:
        """With norms of queries and keys."""
        norm = partial(RMSNorm, eps=self.rms_norm_eps)
        return dataclasses.replace(super().attention_shape(), bias=self.attention_bias, output_bias=self.attention_bias, norm=norm)

    def sparse(self, layer: int) -> bool:
        """Whether block ``layer`` has experts."""
        return layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    def of_blocks(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Those without experts are said one by one."""
        plain = [place for place, block in enumerate(blocks) if not self.sparse(block)]
        return {**super().of_blocks(blocks), "decoder_sparse_step": 1, "mlp_only_layers": plain}


def _canonical(fields: dict[str, Any]) -> dict[str, Any]:
    fields = one_rope(fields)
    if "num_local_experts" in fields:  # transformers 5's name
        fields["num_experts"] = fields.pop("num_local_experts")
    return fields


def _reading(fields: dict[str, Any]) -> dict[str, Any]:
    fields = read_rope(fields)
    if not fields.pop("use_sliding_window", False):
        fields.pop("sliding_window", None)
    if fields.get("use_qk_norm") is True:  # some published files say what is so in any case
        del fields["use_qk_norm"]
    fields.pop("max_window_layers", None)  # no block goes by it in this architecture
    return fields


def _writing(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "use_sliding_window": fields["sliding_window"] is not None}


_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.((?:gate|up|down)_proj)")


class Qwen3MoE(ExpertsDecoder):
    """Qwen3, mixture of experts."""

    config: Qwen3MoEConfig  # type: ignore[assignment]  # another mixture, with the fields its base uses
    hf = HFNames(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            **{k: v for k, v in DEFAULTS.items() if k != "max_window_layers"},
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "output_router_logits": False,
        },
        {"hidden_act": "silu"},
        _reading,
        _writing,
        _canonical,
    )

    def block(self, layer: int) -> nn.Module:
        """Experts, or a plain feed-forward network."""
        c = self.config
        attention = Attention(c.attention_shape(), self.attention)
        if not c.sparse(layer):
            return Block(c, attention, GatedMLP(c.hidden_size, c.intermediate_size))
        moe = MoE(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok, normalise=c.norm_topk_prob)
        return Block(c, attention, moe)

    @property
    def feed_forward_size(self) -> int:
        """Of experts, and of networks without where there are any."""
        c = self.config
        dense = not all(c.sparse(layer) for layer in range(c.num_hidden_layers))
        return math.gcd(c.moe_intermediate_size, c.intermediate_size if dense else 0)

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """An expert is a tensor of its own in the file: ``model.layers.0.mlp.experts.E.up_proj.weight``."""
        if found := _EXPERT.fullmatch(name):
            return [HFTensor(f"model.{found[1]}.{expert}.{found[2]}.weight", expert) for expert in range(self.config.num_experts)]
        return super().hf_tensors(name)
