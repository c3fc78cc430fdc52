"""fw's own attention and caches of keys and values pass what third parties' must."""

from __future__ import annotations

from fw import testing
from fw_plugins.attention.chunked import ChunkedAttention
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.kv_cache.contiguous import Contiguous
from fw_plugins.kv_cache.paged import Paged


class TestSDPA(testing.AttentionSuite):
    plugin = SDPAttention


class TestEager(testing.AttentionSuite):
    plugin = EagerAttention


class TestChunked(testing.AttentionSuite):
    plugin = ChunkedAttention


class TestPaged(testing.KVCacheSuite):
    plugin = Paged
    options = {"block_size": 4}
    bad_options = ({"block_size": 0},)


class TestContiguous(testing.KVCacheSuite):
    plugin = Contiguous
