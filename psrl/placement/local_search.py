"""Local search on a placement: exchange runs of rows between cells while that shortens the critical path.

The critical path is the busiest rank's work, summed over mini-batches. A move exchanges equally many rows, consecutive
in depth-first order, between two cells: single rows, trajectories, whole groups, or padding for any of them. Costs of
all moves between two cells are estimated at once from the neighbours of the runs' ends; the best few are computed
exactly, and one that pays is made.

Shape legend: P rows in depth-first order, R ranks, M mini-batches, W runs of rows of a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.placement.prefix_order import PrefixOrder
from psrl.types import FloatArray, IntArray

_MOST_RUNS = 32
"""Runs of one size that are tried in a cell."""
_MOST_GROUP_SIZES = 8
_ROWS_OF_AN_EFFORT = 128
"""Rows of a cell that cost as much as a pair of cells does in any case."""
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_MOST_PARTNERS = 8
"""Cells that the busiest one of a mini-batch is tried with."""
_EXACT = 6
"""Moves between two cells whose cost is computed exactly."""
_SPREAD_WEIGHT = 0.05
"""Weight of the root mean square of a mini-batch's loads beside their maximum: where several ranks are the busiest,
the maximum alone would not show that one of them was relieved."""
_SPLIT_WEIGHT = 0.002
"""What a group on one more cell must save, as a share of a cell's mean work."""
_LEAST_GAIN = 1e-5
"""Least gain of a move, as a share of a cell's mean work."""


@dataclass(slots=True)
class Grid:
    """A placement that is being improved."""

    places: list[list[IntArray]]
    """[M][R] places of a cell's rows, ascending."""
    load_MR: FloatArray

    @classmethod
    def of(cls, order: PrefixOrder, columns: Sequence[Sequence[IntArray]]) -> Grid:
        """From the rows of every cell, by mini-batch and rank."""
        places = [[np.sort(order.place_S[rows]) for rows in column] for column in columns]
        return cls(places, np.array([[order.workload(cell) for cell in column] for column in places]))

    @property
    def critical_path(self) -> float:
        return float(self.load_MR.max(axis=1).sum())

    def columns(self, order: PrefixOrder) -> list[list[IntArray]]:
        """Rows of every cell, by mini-batch and rank."""
        return [[order.row_P[cell] for cell in column] for column in self.places]


@dataclass(frozen=True, slots=True)
class _Runs:
    """Consecutive rows [begin, end) of a cell, by size; ``leave``: work that goes with them."""

    begin_W: IntArray
    end_W: IntArray
    leave_W: FloatArray
    work_W: FloatArray
    """Work of the run on its own."""
    homes_lost_W: IntArray
    """Groups that have no row left in the cell."""
    first_group_W: IntArray
    last_group_W: IntArray


class LocalSearch:
    """Improves grids of one batch."""

    def __init__(self, order: PrefixOrder, group_P: IntArray, *, may_split: bool, across: bool) -> None:
        """
        Args:
            group_P: group of the row at a place; rows that need no company have a group of their own.
            may_split: a move may put a group on more cells.
            across: a row may move to another mini-batch.
        """
        self._order = order
        self._group_P = group_P
        self._may_split = may_split
        self._across = across

    def improve(self, grid: Grid, effort: float) -> Grid:
        """Exchange rows until nothing pays or the effort, in pairs of small cells, is used up. Changes and returns the
        grid."""
        price = 1 + len(grid.places[0][0]) / _ROWS_OF_AN_EFFORT
        num_cells = grid.load_MR.size
        self._unit = float(grid.load_MR.mean())
        waiting = np.ones(len(grid.places), dtype=bool)
        while waiting.any() and effort > 0 and num_cells > 1:
            gaps = grid.load_MR.max(axis=1) - grid.load_MR.mean(axis=1)
            column = int(np.argmax(np.where(waiting, gaps, -1.0)))
            waiting[column] = False
            for here, there in self._pairs(grid, column):
                effort -= price
                if self._exchange(grid, here, there):
                    waiting[[here[0], there[0]]] = True
                    break
        return grid

    def _pairs(self, grid: Grid, column: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """The busiest cell of a mini-batch with the others of it, and with cells elsewhere that have time to spare."""
        here = (column, int(grid.load_MR[column].argmax()))
        ranks = [int(rank) for rank in np.argsort(grid.load_MR[column]) if rank != here[1]][:_MOST_PARTNERS]
        pairs = [(here, (column, rank)) for rank in ranks]
        if self._across and len(grid.places) > 1:
            spare_MR = grid.load_MR.max(axis=1, keepdims=True) - grid.load_MR
            spare_MR[column] = -1.0
            most = np.argsort(-spare_MR, axis=None)[: max(2, _MOST_PARTNERS - len(pairs))]
            cells = [divmod(int(cell), grid.load_MR.shape[1]) for cell in most]
            pairs += [(here, cell) for cell in cells if cell[0] != column]
        return pairs

    # -------------------------------------------------------------------------------------------------- one pair
    def _exchange(self, grid: Grid, here: tuple[int, int], there: tuple[int, int]) -> bool:
        """Make the best move between two cells, if it pays."""
        mine, theirs = grid.places[here[0]][here[1]], grid.places[there[0]][there[1]]
        sizes = [size for size in self._sizes(mine, theirs) if size < len(mine) or here[0] != there[0]]
        if not sizes:
            return False
        out, back = self._runs(mine, sizes), self._runs(theirs, sizes)
        joins_out, homes_out = self._joining(mine, out, theirs)
        joins_back, homes_back = self._joining(theirs, back, mine)
        pairs_out, pairs_back = _equal_sizes(out.end_W - out.begin_W, back.end_W - back.begin_W)
        load_here = grid.load_MR[here] - out.leave_W[pairs_out] + joins_back[pairs_back]
        load_there = grid.load_MR[there] - back.leave_W[pairs_back] + joins_out[pairs_out]
        homes = homes_out[pairs_out] - out.homes_lost_W[pairs_out]
        homes = homes + homes_back[pairs_back] - back.homes_lost_W[pairs_back]
        value = self._value(grid, here, there, load_here, load_there) + _SPLIT_WEIGHT * self._unit * homes
        now = self._value(grid, here, there, grid.load_MR[here], grid.load_MR[there])
        before = self._critical(grid, here, there, grid.load_MR[here], grid.load_MR[there])
        best = now - _LEAST_GAIN * self._unit
        found: tuple[IntArray, IntArray, float, float] | None = None
        promising = np.flatnonzero(value < best)  # an estimate is rarely above the cost
        for move in promising[np.argsort(value[promising], kind="stable")[:_EXACT]].tolist():
            one, two = pairs_out[move], pairs_back[move]
            left, right = _swap(mine, theirs, out, int(one), back, int(two))
            loads = self._order.workload(left), self._order.workload(right)
            added = self._num_homes(left, right) - self._num_homes(mine, theirs)
            if added > 0 and not self._may_split:
                continue
            worth = float(self._value(grid, here, there, *loads)) + _SPLIT_WEIGHT * self._unit * added
            if worth < best and self._critical(grid, here, there, *loads) <= before:
                best, found = worth, (left, right, *loads)
        if found is None:
            return False
        grid.places[here[0]][here[1]], grid.places[there[0]][there[1]] = found[:2]
        grid.load_MR[here], grid.load_MR[there] = found[2:]
        return True

    def _sizes(self, mine: IntArray, theirs: IntArray) -> list[int]:
        """Sizes of runs to try: small ones, those of the cells' groups, and coarse steps up to half a cell."""
        limit = len(mine)
        groups = {
            int(size)
            for cell in (mine, theirs)
            for size in np.unique(self._group_P[cell], return_counts=True)[1].tolist()
        }
        steps = {max(1, limit * eighth // 8) for eighth in (1, 2, 3, 4)}
        return sorted(size for size in {*_SIZES, *_evenly(sorted(groups), _MOST_GROUP_SIZES), *steps} if size <= limit)

    def _runs(self, cell: IntArray, sizes: Sequence[int]) -> _Runs:
        """Runs of a cell. Of each size, those that cut least off from what they share, and a sample of the others."""
        length = len(cell)
        begin = np.concatenate([np.arange(length - size + 1) for size in sizes])
        end = np.concatenate([np.arange(size, length + 1) for size in sizes])
        shared = np.concatenate([[0.0], self._order.shared(cell[:-1], cell[1:]), [0.0]])  # with the row before
        total_work = np.concatenate([[0.0], np.cumsum(self._order.work_P[cell])])
        total_shared = np.concatenate([[0.0], np.cumsum(shared)])
        inner = total_shared[end] - total_shared[np.minimum(begin + 1, end)]
        work = total_work[end] - total_work[begin] - inner
        bridge = np.zeros(len(begin))
        both = np.flatnonzero((begin > 0) & (end < length))
        bridge[both] = self._order.shared(cell[begin[both] - 1], cell[end[both]])
        leave = work - shared[begin] - shared[end] + bridge
        keep = _select(sizes, length, work - leave)
        begin, end = begin[keep], end[keep]
        group = self._group_P[cell]
        starts = np.concatenate([[True], group[1:] != group[:-1], [True]])
        number = np.cumsum(starts[:-1]) - 1  # of the group's stretch in the cell
        first_whole = number[begin] + ~starts[begin]
        last_whole = number[end - 1] - ~starts[end]
        return _Runs(
            begin,
            end,
            leave[keep],
            work[keep],
            np.maximum(last_whole - first_whole + 1, 0),
            number[begin],
            number[end - 1],
        )

    def _joining(self, cell: IntArray, runs: _Runs, other: IntArray) -> tuple[FloatArray, IntArray]:
        """Work that a run adds to another cell, and groups that are new to it. Exact where no row of the other cell
        lies between the run's."""
        first, last = cell[runs.begin_W], cell[runs.end_W - 1]
        at = np.searchsorted(other, first)
        join = runs.work_W.copy()
        before, after = np.flatnonzero(at > 0), np.flatnonzero(at < len(other))
        join[before] -= self._order.shared(other[at[before] - 1], first[before])
        after = after[other[at[after]] > last[after]]
        join[after] -= self._order.shared(last[after], other[at[after]])
        both = after[at[after] > 0]
        join[both] += self._order.shared(other[at[both] - 1], other[at[both]])
        group = self._group_P[cell]
        stretch = group[np.concatenate([[True], group[1:] != group[:-1]])]
        is_new = np.concatenate([[0], np.cumsum(~np.isin(stretch, self._group_P[other]))])
        return join, is_new[runs.last_group_W + 1] - is_new[runs.first_group_W]

    def _num_homes(self, left: IntArray, right: IntArray) -> int:
        return len(np.unique(self._group_P[left])) + len(np.unique(self._group_P[right]))

    # ------------------------------------------------------------------------------------------------ objective
    def _critical(self, grid: Grid, here: tuple[int, int], there: tuple[int, int], one: float, two: float) -> float:
        """Critical path of the one or two mini-batches concerned, with other loads of the two cells."""
        return float(sum(part for part, _ in _columns(grid, here, there, one, two)))

    def _value(self, grid: Grid, here: tuple[int, int], there: tuple[int, int], one: Any, two: Any) -> FloatArray:
        """The same, and a little of how the loads spread."""
        parts = _columns(grid, here, there, one, two)
        return np.asarray(sum(most + _SPREAD_WEIGHT * spread for most, spread in parts))


def _columns(
    grid: Grid, here: tuple[int, int], there: tuple[int, int], one: Any, two: Any
) -> list[tuple[FloatArray, FloatArray]]:
    """Maximum and root mean square of the loads of the mini-batches of two cells, for numbers or arrays of loads."""
    cells = [({here[1]: one}, here[0]), ({there[1]: two}, there[0])]
    if here[0] == there[0]:
        cells = [({here[1]: one, there[1]: two}, here[0])]
    found = []
    for loads, column in cells:
        rest = np.delete(grid.load_MR[column], list(loads))
        most, squares = rest.max(initial=0.0), float((rest**2).sum())
        for load in loads.values():
            most, squares = np.maximum(most, load), squares + np.square(load)
        found.append((most, np.sqrt(squares / grid.load_MR.shape[1])))
    return found


def _evenly(values: list[int], most: int) -> list[int]:
    """At most so many of some values, over their whole range."""
    if len(values) <= most:
        return values
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _select(sizes: Sequence[int], length: int, cut_W: FloatArray) -> IntArray:
    """At most ``_MOST_RUNS`` runs of each size: those that cut least, and others evenly over the cell."""
    chosen, offset = [], 0
    for size in sizes:
        count = length - size + 1
        runs = np.arange(offset, offset + count)
        if count > _MOST_RUNS:
            least = np.argpartition(cut_W[offset : offset + count], _MOST_RUNS // 2)[: _MOST_RUNS // 2]
            evenly = np.arange(_MOST_RUNS // 2) * (count - 1) // (_MOST_RUNS // 2 - 1)
            runs = offset + np.unique(np.concatenate([least, evenly]))
        chosen.append(runs)
        offset += count
    return np.concatenate(chosen)


def _equal_sizes(size_V: IntArray, size_W: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs of runs of equal size."""
    ones, twos = [], []
    for size in np.intersect1d(size_V, size_W).tolist():
        one, two = np.flatnonzero(size_V == size), np.flatnonzero(size_W == size)
        ones.append(np.repeat(one, len(two)))
        twos.append(np.tile(two, len(one)))
    empty = np.empty(0, dtype=np.int64)
    return np.concatenate([*ones, empty]), np.concatenate([*twos, empty])


def _swap(mine: IntArray, theirs: IntArray, out: _Runs, one: int, back: _Runs, two: int) -> tuple[IntArray, IntArray]:
    a, b = slice(out.begin_W[one], out.end_W[one]), slice(back.begin_W[two], back.end_W[two])
    left = np.concatenate([np.delete(mine, a), theirs[b]])
    right = np.concatenate([np.delete(theirs, b), mine[a]])
    return np.sort(left), np.sort(right)
