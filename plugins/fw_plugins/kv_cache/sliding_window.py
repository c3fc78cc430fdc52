"""Keys and values of the last tokens and of a few first ones, as they are or in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, UserError
from fw_plugins.kv_cache.fewer_bits import To, check_group, keeping_for, keeping_in
from fw_plugins.kv_cache.in_blocks import Bounds, CacheInBlocks
from fw_plugins.kv_cache.keeping import Plain
from fw_plugins.kv_cache.paged import pool_for, whole_blocks

_GROUP = 32


@dataclass
class SlidingWindowConfig:
    """What is kept."""

    window: int = 1024
    """The last so many tokens."""
    sinks: int = 4
    """And the first so many, which attention leans on (Xiao et al. 2023, https://arxiv.org/abs/2309.17453)."""
    block_size: int = 16
    """Tokens of a block, which is left as a whole."""
    to: To | None = None
    """Keep them in fewer bits, as `quantized` does. int8: 8 bits and a scale for each group. int4: 4 bits, with step and smallest number of
    each group. fp8: e4m3 with a scale for each head and token, on GPUs from compute capability 8.9 on. None: as they were computed."""
    group: int = _GROUP
    """Numbers of a head that share scales, where `to` is int8 or int4; a head that they do not divide has one group for int8, and two for
    int4."""

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("block_size", 1)):
            if getattr(self, name) < least:
                raise UserError(f"kv_cache.{name}: {getattr(self, name)} is too small; the least is {least}")
        check_group(self.group)
        if self.group != _GROUP and self.to not in ("int8", "int4"):
            raise UserError(f"kv_cache.group: {self.group} is of int8 and int4, and kv_cache.to asks for neither; set kv_cache.to, too")


class SlidingWindow(KVCachePlugin):
    """Keys and values of the last tokens and a few first ones: a long sequence in bounded memory, which forgets what is between."""

    Config = SlidingWindowConfig
    lossless = False
    batch_invariant = True

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.config.window, self.config.sinks)

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Of one that is kept."""
        to, group = self.config.to, self.config.group
        keeping = Plain(dtype) if to is None else keeping_in(to, group, dtype)
        return sum(keeping.token_bytes(shape) for shape in shapes)

    def kept_tokens(self, tokens: int, step_tokens: int) -> int:
        """No more than window, sinks and what a step adds."""
        most = CacheInBlocks.most_kept(self._bounds, step_tokens, self.config.block_size)
        return whole_blocks(min(tokens, most), self.config.block_size)

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as blocks are used. Beginnings are not shared: what a token is computed from is not all kept.

        Raises:
            UserError: a head cannot be divided so, or the device has no such numbers.
        """
        to, group = self.config.to, self.config.group
        keeping = Plain(needs.dtype) if to is None else keeping_for(to, group, needs)
        return CacheInBlocks(needs, pool_for(needs, keeping, self.config.block_size, False), keeping, self._bounds)
