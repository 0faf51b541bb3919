"""K/V and gradient storage."""

from psrl.cache.host import HostPool
from psrl.cache.kv_cache import BlockShard, KVCache, KVPair, PathBlocks
from psrl.cache.storage import CacheBytes, DeviceTier, accumulator_dtype
from psrl.cache.tiered import TieredKVCache, make_cache

__all__ = [
    "BlockShard",
    "CacheBytes",
    "DeviceTier",
    "HostPool",
    "KVCache",
    "KVPair",
    "PathBlocks",
    "TieredKVCache",
    "accumulator_dtype",
    "make_cache",
]
