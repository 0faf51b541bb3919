"""Storage tiers of the KV cache. A tier allocates tensors and counts their bytes exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceTier:
    """Memory of the compute device. Another tier (host, disk) offers the same three calls."""

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
