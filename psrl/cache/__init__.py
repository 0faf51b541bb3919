"""K/V and gradient storage."""

from psrl.cache.kv_cache import BlockShard, KVCache, KVPair, PathBlocks
from psrl.cache.storage import DeviceTier

__all__ = ["BlockShard", "DeviceTier", "KVCache", "KVPair", "PathBlocks"]
