"""K/V and gradient storage."""

from psrl.cache.kv_cache import BlockShard, KVCache, KVPair
from psrl.cache.storage import DeviceTier

__all__ = ["BlockShard", "DeviceTier", "KVCache", "KVPair"]
