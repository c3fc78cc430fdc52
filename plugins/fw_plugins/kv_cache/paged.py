"""Blocks of tokens, wherever there is room, by a table for each sequence (Kwon et al. 2023, https://arxiv.org/abs/2309.06180)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fw.api import KVCache, KVCachePlugin, KVNeeds, KVShape, UserError
from fw_plugins.kv_cache.blocks import BlockPool
from fw_plugins.kv_cache.in_blocks import CacheInBlocks
from fw_plugins.kv_cache.keeping import Keeping, Plain


@dataclass
class PagedConfig:
    """How memory is divided."""

    block_size: int = 16
    """Tokens of a block. A sequence wastes half of one on average; a beginning that two share is shared by whole blocks."""
    reuse_prefixes: bool = True
    """Keep what is in full blocks when their sequence has ended, for others that begin with the same tokens, until room is needed."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise UserError(f"kv_cache.block_size: {self.block_size} is too small; the least is 1")


class Paged(KVCachePlugin):
    """Keys and values in blocks that sequences share where they begin alike: no memory is kept free for what may come."""

    Config = PagedConfig
    batch_invariant = True

    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """Keys and values."""
        return sum(Plain(dtype).token_bytes(shape) for shape in shapes)

    def kept_tokens(self, tokens: int, step_tokens: int) -> int:
        """Whole blocks."""
        return whole_blocks(tokens, self.config.block_size)

    def make(self, needs: KVNeeds) -> KVCache:
        """Its memory is taken as blocks are used."""
        return CacheInBlocks(
            needs, pool_for(needs, Plain(needs.dtype), self.config.block_size, self.config.reuse_prefixes), Plain(needs.dtype)
        )


def whole_blocks(tokens: int, block_size: int) -> int:
    """Tokens that the blocks of so many have room for."""
    return -(-tokens // block_size) * block_size


def pool_for(needs: KVNeeds, keeping: Keeping, block_size: int, reuse: bool) -> BlockPool:
    """As many blocks as the budget holds.

    Raises:
        UserError: not one.
    """
    count = int(needs.budget_bytes // (sum(keeping.token_bytes(shape) for shape in needs.shapes) * block_size))
    if count < 1:
        raise UserError(f"inference.kv_budget: {needs.budget_bytes} bytes hold no block of {block_size} tokens")
    return BlockPool(count, block_size, reuse)
