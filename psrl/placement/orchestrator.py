"""Which row of a batch goes to which (mini-batch, rank) cell.

veRL gives rank r the r-th contiguous block of the rows, and the update takes mini-batches from that block in order: one
order of the rows, rank-major and then mini-batch-major, decides everything. Here it is chosen so that samples with
common prefixes meet on one cell, and that the ranks of a mini-batch finish together.

Shape legend: S rows, G groups, V segments (runs of tokens that the same rows hold).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.errors import ConfigError
from psrl.placement.cells import Cells, RowKey
from psrl.placement.local_search import Grid, LocalSearch
from psrl.placement.prefix_order import PrefixOrder
from psrl.placement.schedule import Columns, by_work, schedule
from psrl.placement.segments import Segments
from psrl.placement.starts import blocks, whole_groups
from psrl.types import IntArray

_LEAST_EFFORT, _EFFORT_PER_ROW = 300, 0.3
"""Pairs of small cells that the searches look at, up to a millisecond each."""
_WORTH_SPLITTING = 1.01
"""How much longer the critical path of whole groups may be before groups are split to shorten it."""


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """An order of the rows, and what it costs."""

    order_S: IntArray
    num_split_groups: int
    """Groups on more than one cell."""
    imbalance: float
    """Critical path of the update over its mean: sum over mini-batches of the busiest rank's workload over that of the
    mean. 1.0 is perfect."""
    workload: float
    """Effective workload of all cells."""

    @property
    def critical_path(self) -> float:
        """Workload on the busiest rank of every mini-batch, summed, times the number of ranks."""
        return self.imbalance * self.workload


@dataclass(frozen=True, slots=True)
class _Problem:
    """What every placement of a batch has in common."""

    segments: Segments
    order: PrefixOrder
    cells: Cells
    group_S: IntArray
    is_padding_S: np.ndarray
    mini_batches: list[IntArray] | None
    """Rows of every mini-batch where the membership is given."""

    @property
    def parts(self) -> list[IntArray]:
        """Rows among which cells are formed."""
        return [np.arange(self.cells.num_rows, dtype=np.int64)] if self.mini_batches is None else self.mini_batches

    def whole_groups(self) -> Columns:
        return self._columns(
            [whole_groups(rows, self.group_S, self.is_padding_S, self.segments, self.order, self._num_cells,
                          self.cells.rows_per_cell) for rows in self.parts]
        )  # fmt: skip

    def blocks(self) -> Columns:
        return self._columns([blocks(rows, self.order, self.cells.rows_per_cell) for rows in self.parts])

    def upstream(self, upstream_S: IntArray) -> Columns:
        return [list(column) for column in self.cells.split(upstream_S).transpose(1, 0, 2)]

    @property
    def _num_cells(self) -> int:
        return self.cells.num_ranks * (self.cells.num_mini_batches if self.mini_batches is None else 1)

    def _columns(self, parts: list[list[IntArray]]) -> Columns:
        return [column for found in parts for column in by_work(found, self.segments, self.cells.num_ranks)]

    def improve(self, start: Columns, share: float, *, may_split: bool) -> Grid:
        """Search from a placement, with a share of the effort that a batch of this size is worth."""
        search = LocalSearch(
            self.order, self.group_S[self.order.row_P], may_split=may_split, across=self.mini_batches is None
        )
        return search.improve(
            Grid.of(self.order, start), share * (_LEAST_EFFORT + self.cells.num_rows * _EFFORT_PER_ROW)
        )

    def schedule(self, grid: Grid, limit: float) -> IntArray:
        columns = grid.columns(self.order)
        return schedule(columns, self.segments, may_regroup=self.mini_batches is None, limit=limit).reshape(-1)


def place_rows(
    keys: Sequence[RowKey],
    is_padding_S: np.ndarray,
    segments: Segments,
    cells: Cells,
    *,
    grouping: str,
    split_groups: bool,
    upstream_S: IntArray | None = None,
    keep_mini_batches: bool = False,
) -> RowPlacement:
    """Order the rows.

    Several placements are improved by local search: whole groups longest-first, blocks of rows in depth-first order,
    and veRL's own. The one with the shortest critical path is taken; of splits, only one that makes it shorter by more
    than 1 % than whole groups do.

    Args:
        keys: of the S rows.
        is_padding_S: rows without targets that fill the batch up.
        segments: what the rows share.
        cells: the grid.
        grouping: ``session``: groups are trajectories; else they are the rows of a prompt.
        split_groups: split groups also where that lowers the critical path. False: only where equal rows force it.
        upstream_S: veRL's order. With ``split_groups`` the critical path is never longer than that of this order.
        keep_mini_batches: every mini-batch keeps the rows that ``upstream_S`` gives it.

    Raises:
        ConfigError: ``keep_mini_batches`` without veRL's order.
    """
    if keep_mini_batches and upstream_S is None:
        raise ConfigError("psrl.keep_minibatch needs veRL's order of the rows")
    group_S = _group_numbers(keys, is_padding_S, grouping)
    order = PrefixOrder.of(segments, group_S)
    kept = upstream_mini_batches(upstream_S, cells) if keep_mini_batches and upstream_S is not None else None
    problem = _Problem(segments, order, cells, group_S, is_padding_S, kept)
    whole = found = problem.improve(problem.whole_groups(), 0.2, may_split=False)
    limit = np.inf
    if split_groups:
        starts = [whole.columns(order), problem.blocks()]
        if upstream_S is not None:
            starts.append(problem.upstream(upstream_S))
            limit = Grid.of(order, starts[-1]).critical_path
        grids = [problem.improve(start, 0.2, may_split=True) for start in starts]
        best = min(grids, key=lambda grid: grid.critical_path)
        found = problem.improve(best.columns(order), 0.4, may_split=True)
        if whole.critical_path <= min(limit, _WORTH_SPLITTING * found.critical_path):
            found = whole
    return evaluate(keys, is_padding_S, segments, cells, problem.schedule(found, limit), grouping)


def evaluate(
    keys: Sequence[RowKey],
    is_padding_S: np.ndarray,
    segments: Segments,
    cells: Cells,
    order_S: IntArray,
    grouping: str,
) -> RowPlacement:
    """What an order costs."""
    grid = cells.split(order_S)
    loads = np.array([[segments.workload(cell) for cell in rank] for rank in grid])  # [ranks, mini-batches]
    total = float(loads.sum())
    critical = float(loads.max(axis=0).sum()) * cells.num_ranks
    homes: dict[tuple[str, ...], set[int]] = {}
    for cell, rows in enumerate(grid.reshape(-1, cells.rows_per_cell)):
        for row in rows.tolist():
            if not is_padding_S[row]:
                homes.setdefault(_group_of(keys[row], grouping), set()).add(cell)
    return RowPlacement(
        order_S=order_S.astype(np.int64),
        num_split_groups=sum(len(places) > 1 for places in homes.values()),
        imbalance=critical / total if total else 1.0,
        workload=total,
    )


def _group_of(key: RowKey, grouping: str) -> tuple[str, ...]:
    return (key.uid, key.session) if grouping == "session" else (key.uid,)


def _group_numbers(keys: Sequence[RowKey], is_padding_S: np.ndarray, grouping: str) -> IntArray:
    """[S] number of the row's group, by order of the keys; a padding row is a group of its own, after all others."""
    names = sorted({_group_of(key, grouping) for key, padding in zip(keys, is_padding_S, strict=True) if not padding})
    number = {name: index for index, name in enumerate(names)}
    return np.array(
        [len(names) + row if is_padding_S[row] else number[_group_of(key, grouping)] for row, key in enumerate(keys)],
        dtype=np.int64,
    )


def upstream_mini_batches(order_S: IntArray, cells: Cells) -> list[IntArray]:
    """Rows of every mini-batch that an order gives."""
    grid = cells.split(order_S)
    return [np.sort(grid[:, index].reshape(-1)) for index in range(cells.num_mini_batches)]


def placement_metrics(before: RowPlacement, after: RowPlacement, seconds: float) -> Mapping[str, Any]:
    """``psrl/*`` of a placement; ``before`` is veRL's own."""
    return {
        "psrl/load_imbalance/before": before.imbalance,
        "psrl/load_imbalance/after": after.imbalance,
        "psrl/placement/workload_ratio": after.workload / before.workload if before.workload else 1.0,
        "psrl/placement/split_groups_before": before.num_split_groups,
        "psrl/placement/split_groups": after.num_split_groups,
        "psrl/placement/seconds": seconds,
    }
