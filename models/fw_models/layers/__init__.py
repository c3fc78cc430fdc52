"""Layers the architectures share.

Shape suffixes: B batch, L length, D hidden size, N query heads, K key/value heads, H head dimension, F feed-forward size, V vocabulary.
"""

from fw_models.layers.attention import Attention
from fw_models.layers.mlp import GatedMLP
from fw_models.layers.norm import RMSNorm
from fw_models.layers.rope import rope_angles, rotate

__all__ = ["Attention", "GatedMLP", "RMSNorm", "rope_angles", "rotate"]
