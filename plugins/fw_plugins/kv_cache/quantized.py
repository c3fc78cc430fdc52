"""Keys and values in blocks, in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape
from fw_plugins.kv_cache.fewer_bits import To, check_group, keeping_for, keeping_in
from fw_plugins.kv_cache.in_blocks import CacheInBlocks
from fw_plugins.kv_cache.paged import PagedConfig, pool_for, whole_blocks


@dataclass
class QuantizedConfig(PagedConfig):
    """How keys and values are kept."""

    to: To = "int8"
    """int8: 8 bits and a scale for each group. int4: 4 bits, with step and smallest number of each group. fp8: e4m3 with a scale for each
    head and token, on GPUs from compute capability 8.9 on."""
    group: int = 32
    """Numbers of a head that share scales; a head that they do not divide has one group for int8, and two for int4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)


class Quantized(KVCachePlugin):
    """Keys and values of each token in 8 or 4 bits: twice to three times as many tokens in the same memory, which are also read faster."""

    Config = QuantizedConfig
    lossless = False
    batch_invariant = True

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Codes and scales."""
        return sum(keeping_in(self.config.to, self.config.group, dtype).token_bytes(shape) for shape in shapes)

    def kept_tokens(self, tokens: int, step_tokens: int) -> int:
        """Whole blocks."""
        return whole_blocks(tokens, self.config.block_size)

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as blocks are used.

        Raises:
            UserError: a head cannot be divided so, or the device has no such numbers.
        """
        keeping = keeping_for(self.config.to, self.config.group, needs)
        return CacheInBlocks(needs, pool_for(needs, keeping, self.config.block_size, self.config.reuse_prefixes), keeping)
