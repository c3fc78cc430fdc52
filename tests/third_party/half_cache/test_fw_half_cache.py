"""The cache passes what every kv_cache plugin must, rounded as it says."""

from fw_half_cache import Half

from fw import testing


class TestHalf(testing.KVCacheSuite):
    plugin = Half
    tolerance = 4e-3
