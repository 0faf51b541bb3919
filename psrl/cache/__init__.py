"""K/V and gradient storage."""

from psrl.cache.kv_cache import KVCache, KVPair
from psrl.cache.storage import DeviceTier

__all__ = ["DeviceTier", "KVCache", "KVPair"]
