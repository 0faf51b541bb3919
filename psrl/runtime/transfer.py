"""From host arrays to device tensors."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on ``device``.

    To a GPU from pinned memory on a stream of its own: the host does not wait, nor does the copy for what the GPU has
    still to compute. The current stream waits for the copy.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.clone()
    current = torch.cuda.current_stream(device)
    side = copy_stream(current.device_index)
    with torch.cuda.stream(side):
        copy = tensor.pin_memory().to(device, non_blocking=True)
    current.wait_stream(side)
    copy.record_stream(current)  # its memory is the side stream's, which does not see when it is read
    return copy


@functools.cache
def copy_stream(device_index: int) -> torch.cuda.Stream:
    """The stream on which ``to_device`` copies to a GPU."""
    return torch.cuda.Stream(device_index)
