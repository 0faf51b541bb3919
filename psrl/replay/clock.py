"""What a call took: elapsed time as the user sees it, processor time of this process, which other processes do not
disturb, and memory of the GPU."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Seconds(NamedTuple):
    wall: float = 0.0
    cpu: float = 0.0
    """Over all threads."""

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def minus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    """Once the GPU, where there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.perf_counter(), time.process_time())


class PeakMemory:
    """Most bytes of the GPU that PyTorch had allocated since this was made, beyond those it had then.

    Weights, gradients and optimizer are there before and do not count; activations, logits and cached K/V do.
    """

    def __init__(self) -> None:
        self._has_gpu = torch.cuda.is_available()
        self._peak = 0
        self._before = torch.cuda.memory_allocated() if self._has_gpu else 0
        self.resume()

    def pause(self) -> None:
        """What is allocated until ``resume`` does not count."""
        if self._has_gpu:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated() - self._before)

    def resume(self) -> None:
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()

    def stop(self) -> int | None:
        """Bytes; None where there is no GPU."""
        self.pause()
        return self._peak if self._has_gpu else None
