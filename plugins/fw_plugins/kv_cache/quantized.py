"""Keys and values in blocks, in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, UserError, capability_of
from fw_plugins.kv_cache.in_blocks import CacheInBlocks
from fw_plugins.kv_cache.keeping import Float8, Int4, Int8, Keeping
from fw_plugins.kv_cache.paged import PagedConfig, pool_for, whole_blocks

_FP8_SINCE = (8, 9)
"""Compute capability: Ada and Hopper."""


@dataclass
class QuantizedConfig(PagedConfig):
    """How keys and values are kept."""

    to: Literal["int8", "int4", "fp8"] = "int8"
    """int8: 8 bits and a scale for each group. int4: 4 bits, with step and smallest number of each group. fp8: e4m3 with a scale for each
    head and token, on GPUs from compute capability 8.9 on."""
    group: int = 32
    """Numbers of a head that share scales; a head that they do not divide has one group for int8, and two for int4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 16 or self.group % 16:
            raise UserError(f"kv_cache.group: {self.group} is no multiple of 16")


class Quantized(KVCachePlugin):
    """Keys and values of each token in 8 or 4 bits: twice to three times as many tokens in the same memory, which are also read faster."""

    Config = QuantizedConfig
    lossless = False

    def _keeping(self, dtype: torch.dtype, device: torch.device | None = None) -> Keeping:
        if self.config.to == "fp8":
            if device is not None and (capability_of(device) or (0, 0)) < _FP8_SINCE:
                raise UserError("kv_cache.to: fp8 needs a GPU of compute capability 8.9 or more; int8 takes as little, anywhere")
            return Float8(dtype)
        return {"int8": Int8, "int4": Int4}[self.config.to](dtype, self.config.group)

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Codes and scales."""
        return sum(self._keeping(dtype).token_bytes(shape) for shape in shapes)

    def kept_tokens(self, tokens: int, step_tokens: int) -> int:
        """Whole blocks."""
        return whole_blocks(tokens, self.config.block_size)

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as blocks are used.

        Raises:
            UserError: a head cannot be divided so, or the device has no such numbers.
        """
        keeping = self._keeping(needs.dtype, needs.device)
        if self.config.to == "int4" and (odd := [shape.head_dim for shape in needs.shapes if shape.head_dim % 2]):
            raise UserError(f"kv_cache.to: int4 needs an even head dimension, and the model's is {odd[0]}; use int8")
        return CacheInBlocks(needs, pool_for(needs, keeping, self.config.block_size, self.config.reuse_prefixes), keeping)
