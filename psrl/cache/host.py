"""Host memory of the cache: a pool of pinned memory, and copies between it and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from psrl.errors import MemoryBudgetError, PlanError

CHUNK_BYTES = 64 << 20


class HostPool:
    """Host memory, pinned where the device is a GPU, that grows to the largest need and is kept.

    Where copies lie in it is the plan's decision. One cache has it at a time.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        """
        Args:
            chunk_bytes: memory comes in chunks of so many bytes. A power of two: torch rounds pinned memory up to one.
        """
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._is_pinned = False
        self._is_lent = False

    @property
    def num_bytes(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    def lend(self, num_bytes: int, device: torch.device) -> None:
        """Have at least ``num_bytes`` for a cache on ``device``, until it calls ``take_back``.

        Raises:
            MemoryBudgetError: the host has not got as much.
            PlanError: another cache has the pool.
        """
        if self._is_lent:
            raise PlanError("the host pool is in use by another cache")
        is_pinned = device.type == "cuda"
        if is_pinned != self._is_pinned:
            self._chunks, self._is_pinned = [], is_pinned
        try:
            while self.num_bytes < num_bytes:
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=is_pinned))
        except RuntimeError as error:
            raise MemoryBudgetError(
                f"the host cannot give {num_bytes:,} bytes{' of pinned memory' if is_pinned else ''} for cached K/V: "
                f"raise psrl.kv_cache_bytes or psrl.max_tokens, so that less is offloaded ({error})"
            ) from error
        self._is_lent = True

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """The bytes ``[start, stop)``, a tensor for each chunk that they lie in."""
        size = self._chunk_bytes
        first, last = start // size, (stop - 1) // size
        return [
            self._chunks[chunk][max(start - chunk * size, 0) : min(stop - chunk * size, size)]
            for chunk in range(first, last + 1)
        ]

    def take_back(self) -> None:
        self._is_lent = False


HOST_POOL = HostPool()
"""Of the process: the engines of a process (actor, reference, critic) take turns, so they need it once."""


class Transfers:
    """Copies between a device and the host. On a GPU each direction has a stream of its own, beside the computation.

    Memory of the device belongs to the stream of the computation: a copy starts after what that stream has queued, and
    that stream waits for a copy before memory that it reads or writes is used or freed.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._in = torch.cuda.Stream(device) if is_cuda else None

    def to_host(self, copy: Sequence[Tensor], unit: Tensor) -> torch.cuda.Event | None:
        """Start to copy a unit to parts of the pool. Returns what to ``wait`` for before it changes or is freed."""
        return _copy(list(zip(copy, _cut(unit, copy), strict=True)), self._out)

    def to_device(self, unit: Tensor, copy: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy a unit from parts of the pool. Returns what to ``wait`` for before it is used or freed."""
        return _copy(list(zip(_cut(unit, copy), copy, strict=True)), self._in)

    @staticmethod
    def wait(copied: torch.cuda.Event | None) -> None:
        """Let the computation wait for a copy. The host does not."""
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def drain(self) -> None:
        """The host waits for all copies."""
        for stream in (self._out, self._in):
            if stream is not None:
                stream.synchronize()


def _cut(unit: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """A unit's bytes, cut as ``parts`` are."""
    return unit.view(torch.uint8).split([len(part) for part in parts])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy to the first of each pair."""
    if stream is None:
        for target, source in pairs:
            target.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied
