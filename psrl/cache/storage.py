"""Memory of the compute device for the KV cache, counted exactly. The host's is in ``host.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from psrl.types import PlanStats


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of K/V of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DeviceTier:
    """Memory of the compute device."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.live_bytes += tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor

    def free(self, *tensors: Tensor) -> None:
        """Account for tensors that the caller drops. Memory returns when the last reference is gone."""
        self.live_bytes -= sum(x.untyped_storage().nbytes() for x in tensors)

    def clear(self) -> None:
        """Account for a caller that drops everything, half of what it wanted included."""
        self.live_bytes = 0


class CacheBytes(NamedTuple):
    """Bytes of a rank's cache by tier, measured or predicted."""

    device_peak: int = 0
    host_peak: int = 0
    """Of the host pool, from its begin to the last byte in use."""
    to_host: int = 0
    to_device: int = 0

    @classmethod
    def predicted(cls, stats: PlanStats) -> CacheBytes:
        return cls(stats.kv_bytes_peak, stats.kv_host_bytes_peak, stats.kv_bytes_to_host, stats.kv_bytes_to_device)

    def beside(self, other: CacheBytes) -> CacheBytes:
        """Of both caches, at the same time."""
        return CacheBytes(*(a + b for a, b in zip(self, other, strict=True)))

    def then(self, other: CacheBytes) -> CacheBytes:
        """Of both, one after the other."""
        return CacheBytes(
            max(self.device_peak, other.device_peak),
            max(self.host_peak, other.host_peak),
            self.to_host + other.to_host,
            self.to_device + other.to_device,
        )
