"""Layers the architectures share.

Shape suffixes: B batch, L length, D hidden size, N query heads, K key/value heads, H head dimension, F feed-forward size, V vocabulary,
T tokens (B · L), E experts, k experts per token, S rows sorted by expert (T · k).
"""

from fw_models.layers.attention import Attention, AttentionShape
from fw_models.layers.mlp import ACTIVATIONS, GatedMLP
from fw_models.layers.moe import MoE, balance_loss
from fw_models.layers.norm import RMSNorm, ShiftedRMSNorm
from fw_models.layers.prefix import Prefixed, attend, by_block, prefix_width, segments_with
from fw_models.layers.prompt import prepend
from fw_models.layers.rope import Angles, Rope, RopeScaling, rotate

__all__ = [
    "ACTIVATIONS",
    "Angles",
    "Attention",
    "AttentionShape",
    "GatedMLP",
    "MoE",
    "Prefixed",
    "RMSNorm",
    "Rope",
    "RopeScaling",
    "ShiftedRMSNorm",
    "attend",
    "balance_loss",
    "by_block",
    "prefix_width",
    "prepend",
    "rotate",
    "segments_with",
]
