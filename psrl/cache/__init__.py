"""K/V and gradient storage."""

from psrl.cache.host import HostPool
from psrl.cache.kv_cache import BlockShard, KVCache, KVPair, PathBlocks
from psrl.cache.storage import CacheBytes, DeviceTier
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
    "make_cache",
]
