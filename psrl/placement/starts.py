"""Placements from which the search starts: cells of equal size, without regard to when they run."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np

from psrl.grouping import SemanticGroup, place_groups
from psrl.placement.prefix_order import PrefixOrder
from psrl.placement.segments import Segments
from psrl.types import FloatArray, IntArray


def blocks(rows: IntArray, order: PrefixOrder, rows_per_cell: int) -> list[IntArray]:
    """Consecutive rows in depth-first order: hardly anything is computed on two cells."""
    places = np.sort(order.place_S[rows])
    return [order.row_P[places[i : i + rows_per_cell]] for i in range(0, len(places), rows_per_cell)]


def whole_groups(
    rows: IntArray,
    group_S: IntArray,
    is_padding_S: np.ndarray,
    segments: Segments,
    order: PrefixOrder,
    num_cells: int,
    rows_per_cell: int,
) -> list[IntArray]:
    """Whole groups, longest first, on the cell with least work. Padding, which costs next to nothing, goes where room
    is left."""
    in_order = order.row_P[np.sort(order.place_S[rows])]

    def workload(positions: IntArray) -> float:
        return segments.workload(in_order[positions])

    members: dict[int, list[int]] = {}
    groups: list[SemanticGroup] = []
    for position, row in enumerate(in_order.tolist()):
        if is_padding_S[row]:
            groups.append(SemanticGroup(int(group_S[row]), np.array([position]), 0.0))
        else:
            members.setdefault(int(group_S[row]), []).append(position)
    for group, positions in members.items():
        for piece in cut(np.asarray(positions), order, in_order, rows_per_cell):
            groups.append(SemanticGroup(group, piece, workload(piece)))
    placed = place_groups(groups, num_cells, workload)
    return [in_order[cell] for cell in placed.cells]


def cut(positions: IntArray, order: PrefixOrder, in_order: IntArray, limit: int) -> list[IntArray]:
    """A group as runs of at most ``limit`` rows: those that compute the fewest tokens twice.

    Args:
        positions: of the group's rows in ``in_order``, ascending.
        order: gives what neighbours share.
        in_order: rows, in depth-first order.
        limit: most rows of a run.
    """
    if len(positions) <= limit:
        return [positions]
    places = order.place_S[in_order[positions]]
    bounds = cheapest_cuts(order.shared(places[:-1], places[1:]), limit)
    return [positions[begin:end] for begin, end in pairwise(bounds)]


def cheapest_cuts(cost: FloatArray, limit: int) -> list[int]:
    """Bounds 0 = b0 < b1 < … = n of runs of at most ``limit`` of n = len(cost) + 1 things, with the lowest sum of the
    costs of the cuts; ``cost[i]`` is that of a cut before thing i + 1. Of equal sums, the fewest runs."""
    num = len(cost) + 1
    total: list[tuple[float, int]] = [(0.0, 0)]  # of the first things, ending in a cut
    before = [0]
    window: deque[int] = deque([0])  # cuts that may come next, with rising totals
    for end in range(1, num + 1):
        while window[0] < end - limit:
            window.popleft()
        start = window[0]
        price = float(cost[end - 1]) if end < num else 0.0
        total.append((total[start][0] + price, total[start][1] + 1))
        before.append(start)
        while window and total[window[-1]] >= total[end]:
            window.pop()
        window.append(end)
    bounds = [num]
    while bounds[-1]:
        bounds.append(before[bounds[-1]])
    return bounds[::-1]
