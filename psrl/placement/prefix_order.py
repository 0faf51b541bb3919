"""Rows in the depth-first order of what they share: the work of any set of them is a sum over neighbours.

In that order the rows below a fork are consecutive, so the common prefix of two rows is the shortest between neighbours
on the way from one to the other, and rows on one cell cost what each costs alone less what it shares with the one
before it. Costs of moving consecutive rows follow without looking at a segment.

Shape legend: S rows, P rows in depth-first order, V segments, K powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from psrl.placement.segments import Segments
from psrl.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Rows named by their place in the order."""

    row_P: IntArray
    """Row at a place."""
    place_S: IntArray
    """Place of a row."""
    work_P: FloatArray
    """Work of a row on its own."""
    lowest_KP: FloatArray
    """``lowest_KP[k, p]``: work of the shortest prefix common to neighbours among places [p, p + 2**k]."""

    @classmethod
    def of(cls, segments: Segments, group_S: IntArray) -> PrefixOrder:
        """Order the rows. Groups are kept consecutive where the prefixes allow it.

        Args:
            segments: what the rows share; the segments of a row are its prefix tree path, from the root.
            group_S: number of each row's group.
        """
        num_segments = len(segments.weight_V)
        first_group_V = np.full(num_segments, np.iinfo(np.int64).max)
        np.minimum.at(
            first_group_V, np.concatenate(segments.rows), np.repeat(group_S, [len(path) for path in segments.rows])
        )
        rank_V = np.empty(num_segments, dtype=np.int64)
        rank_V[np.lexsort((np.arange(num_segments), first_group_V))] = np.arange(num_segments)
        paths = [tuple(rank_V[path].tolist()) for path in segments.rows]
        order: list[int] = sorted(range(len(paths)), key=lambda row: (paths[row], row))
        reached = [np.cumsum(segments.weight_V[segments.rows[row]]) for row in order]
        shared = np.zeros(max(len(order) - 1, 0))
        for place, (one, two) in enumerate(pairwise(order)):
            depth = _common_length(paths[one], paths[two])
            shared[place] = reached[place][depth - 1] if depth else 0.0
        row_P = np.asarray(order, dtype=np.int64)
        place_S = np.empty_like(row_P)
        place_S[row_P] = np.arange(len(row_P))
        work_P = np.asarray([path[-1] if len(path) else 0.0 for path in reached])
        return cls(row_P, place_S, work_P, _range_minima(shared))

    def shared(self, left: IntArray, right: IntArray) -> FloatArray:
        """Work of the common prefix of pairs of places, ``left < right``."""
        level = np.frexp(right - left)[1] - 1  # floor(log2)
        return np.minimum(self.lowest_KP[level, left], self.lowest_KP[level, right - (1 << level)])

    def workload(self, places: IntArray) -> float:
        """Work of rows that share one cell; places ascending."""
        if not len(places):
            return 0.0
        return float(self.work_P[places].sum() - self.shared(places[:-1], places[1:]).sum())


def _common_length(one: Sequence[int], two: Sequence[int]) -> int:
    for depth, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return depth
    return min(len(one), len(two))


def _range_minima(values: FloatArray) -> FloatArray:
    """[K, P] minima of ``values[p : p + 2**k]``; of as many as there are near the end."""
    tables = [values]
    width = 1
    while 2 * width <= len(values):
        tables.append(tables[-1].copy())
        tables[-1][:-width] = np.minimum(tables[-2][:-width], tables[-2][width:])
        width *= 2
    return np.stack(tables)
