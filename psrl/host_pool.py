"""Places of copies in the host pool, decided before anything is copied."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psrl.tiers import Unit

ALIGNMENT = 16
"""Bytes. Copies begin at multiples of it, whatever their type."""


@dataclass(frozen=True, slots=True)
class Placement:
    starts: tuple[tuple[int, ...], ...]
    """Per step, the first byte of each copy that begins with it."""
    bytes_in_use: tuple[int, ...]
    """Per step, bytes of copies while it runs, gaps not counted."""
    size: int
    """One past the last byte that a copy takes."""


def place(steps: Sequence[tuple[Sequence[Unit], Sequence[Unit]]], unit_bytes: Callable[[Unit], int]) -> Placement:
    """Give every copy the smallest hole that takes it.

    Args:
        steps: per step, the copies that begin with it and those that end after it. Units without a copy among the
            latter are passed over.
    """
    holes: list[tuple[int, int]] = []  # (start, stop), ascending, apart from each other
    taken: dict[Unit, tuple[int, int]] = {}
    end, size, in_use = 0, 0, 0
    starts: list[tuple[int, ...]] = []
    used: list[int] = []
    for begin, finish in steps:
        row: list[int] = []
        for unit in begin:
            needed = -(-unit_bytes(unit) // ALIGNMENT) * ALIGNMENT
            fitting = [hole for hole in holes if hole[1] - hole[0] >= needed]
            if fitting:
                hole = min(fitting, key=lambda hole: (hole[1] - hole[0], hole[0]))
                holes.remove(hole)
                start = hole[0]
                if hole[1] > start + needed:
                    insort(holes, (start + needed, hole[1]))
            else:
                start = holes.pop()[0] if holes and holes[-1][1] == end else end
                end = start + needed
            taken[unit] = (start, start + needed)
            size = max(size, start + unit_bytes(unit))
            in_use += unit_bytes(unit)
            row.append(start)
        starts.append(tuple(row))
        used.append(in_use)
        for unit in finish:
            if unit in taken:
                _release(holes, *taken.pop(unit))
                in_use -= unit_bytes(unit)
    return Placement(tuple(starts), tuple(used), size)


def _release(holes: list[tuple[int, int]], start: int, stop: int) -> None:
    """Return a range, joined with its neighbours."""
    for hole in [hole for hole in holes if hole[1] == start or hole[0] == stop]:
        holes.remove(hole)
        start, stop = min(start, hole[0]), max(stop, hole[1])
    insort(holes, (start, stop))
