"""How veRL itself places rows, without looking at prefixes: a placement to start from, and to compare with.

The largest differencing method (Karmarkar and Karp, 1982) with veRL's tie-breaking (verl/utils/seqlen_balancing.py:44,
``calculate_workload``), without torch. A test compares it with veRL's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from psrl.errors import ConfigError
from psrl.types import IntArray

_Subset = tuple[int, int, tuple[tuple[int, int], ...]]
"""(sum, number of items, items as (index, value)): Python's order of tuples is the order that breaks ties."""


class _State:
    """Partial partition: ``k`` subsets, largest first. States are ordered by spread, widest first."""

    __slots__ = ("subsets",)

    def __init__(self, subsets: list[_Subset]) -> None:
        self.subsets = sorted(subsets, reverse=True)

    @property
    def spread(self) -> int:
        return self.subsets[0][0] - self.subsets[-1][0]

    def __lt__(self, other: _State) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.subsets[0] > other.subsets[0]

    def merged(self, other: _State) -> _State:
        """The largest of one with the smallest of the other."""
        return _State(
            [
                (a[0] + b[0], a[1] + b[1], a[2] + b[2])
                for a, b in zip(self.subsets, reversed(other.subsets), strict=True)
            ]
        )


def balanced_partition(values: Sequence[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Indices of ``values`` in ``num_parts`` parts of near-equal sum.

    Raises:
        ConfigError: equal sizes are asked for and the values do not divide.
    """
    if equal_size and len(values) % num_parts:
        raise ConfigError(f"{len(values)} rows do not divide over {num_parts} ranks")
    items = sorted((int(value), index) for index, value in enumerate(values))
    empty: _Subset = (0, 0, ())
    states: list[_State] = []
    width = num_parts if equal_size else 1
    for start in range(0, len(items), width):
        subsets: list[_Subset] = [(value, 1, ((index, value),)) for value, index in items[start : start + width]]
        heapq.heappush(states, _State(subsets + [empty] * (num_parts - len(subsets))))
    while len(states) > 1:
        first, second = heapq.heappop(states), heapq.heappop(states)
        heapq.heappush(states, first.merged(second))
    return [sorted(index for index, _ in subset[2]) for subset in states[0].subsets]


def row_workload(seqlens_S: IntArray) -> IntArray:
    """veRL's workload of a row: 24576 * length + length^2 (coefficients of a hidden size of 4096)."""
    return 24576 * seqlens_S + seqlens_S**2


def upstream_order(seqlens_S: IntArray, num_ranks: int) -> IntArray:
    """Rows in rank-major order, as veRL's ``_balance_batch`` gives them."""
    parts = balanced_partition(row_workload(seqlens_S).tolist(), num_ranks, equal_size=True)
    return np.asarray([row for part in parts for row in part], dtype=np.int64)
