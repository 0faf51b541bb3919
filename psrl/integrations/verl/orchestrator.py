"""Which row of a batch goes to which (mini-batch, rank) cell.

veRL gives rank r the r-th contiguous block of the rows, and the update takes mini-batches from that block in order: one
order of the rows, rank-major and then mini-batch-major, decides everything. Here it is chosen so that samples with
common prefixes meet on one cell, and that the ranks of a mini-batch finish together.

Shape legend: S rows, G groups, V segments (runs of tokens that the same rows hold).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from psrl.errors import ConfigError
from psrl.grouping import Placement, SemanticGroup, place_groups
from psrl.integrations.verl.segments import Segments
from psrl.types import FloatArray, IntArray


class RowKey(NamedTuple):
    """A row's key in TransferQueue: ``{uid}_{session}_{index}``."""

    uid: str
    session: str
    index: int

    @classmethod
    def parse(cls, key: str) -> RowKey:
        uid, session, index = key.rsplit("_", 2)
        return cls(uid, session, int(index))


@dataclass(frozen=True, slots=True)
class Cells:
    """The grid of a step: every cell has the same number of rows."""

    num_ranks: int
    num_mini_batches: int
    rows_per_cell: int

    @classmethod
    def of(cls, num_rows: int, num_ranks: int, mini_batch_rows: int) -> Cells:
        """
        Raises:
            ConfigError: the rows do not divide.
        """
        if num_rows % mini_batch_rows or mini_batch_rows % num_ranks:
            raise ConfigError(
                f"{num_rows} rows do not divide into mini-batches of {mini_batch_rows} rows over {num_ranks} ranks"
            )
        return cls(num_ranks, num_rows // mini_batch_rows, mini_batch_rows // num_ranks)

    @property
    def num_rows(self) -> int:
        return self.num_ranks * self.num_mini_batches * self.rows_per_cell

    def split(self, order_S: IntArray) -> IntArray:
        """[ranks, mini-batches, rows of a cell] rows of an order that is rank-major, then mini-batch-major."""
        return order_S.reshape(self.num_ranks, self.num_mini_batches, self.rows_per_cell)


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


def place_rows(
    keys: Sequence[RowKey],
    is_padding_S: np.ndarray,
    segments: Segments,
    cells: Cells,
    *,
    grouping: str,
    split_groups: bool,
    mini_batches: Sequence[IntArray] | None = None,
) -> RowPlacement:
    """Order the rows.

    Args:
        keys: of the S rows.
        is_padding_S: rows without targets that fill the batch up.
        segments: what the rows share.
        cells: the grid.
        grouping: ``uid``, ``session`` or ``tokens`` (as ``uid``).
        split_groups: split groups also where that lowers the critical path.
        mini_batches: rows of every mini-batch, where the membership is given; None: any.
    """
    everything = np.arange(len(keys), dtype=np.int64)
    parts = [everything] if mini_batches is None else list(mini_batches)
    chosen: list[list[IntArray]] = []
    for rows in parts:
        num_cells = cells.num_ranks * (cells.num_mini_batches if mini_batches is None else 1)
        placement = _place(keys, is_padding_S, segments, rows, num_cells, cells.rows_per_cell, grouping)
        found = [rows[cell] for cell in placement.cells]
        if split_groups:
            found = _balance(found, segments)
        chosen += _mini_batches(found, segments, cells.num_ranks)
    grid = _assign_ranks(chosen, segments, cells)
    return evaluate(keys, is_padding_S, segments, cells, grid.reshape(-1), grouping)


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


def _place(
    keys: Sequence[RowKey],
    is_padding_S: np.ndarray,
    segments: Segments,
    rows: IntArray,
    num_cells: int,
    rows_per_cell: int,
    grouping: str,
) -> Placement:
    """Cells of positions in ``rows``. Whole groups first; padding, which costs next to nothing, goes where room is."""

    def workload(positions: IntArray) -> float:
        return segments.workload(rows[positions])

    members: dict[tuple[str, ...], list[int]] = {}
    groups: list[SemanticGroup] = []
    in_order = sorted(range(len(rows)), key=lambda position: keys[rows[position]])
    for position in in_order:
        row = int(rows[position])
        if is_padding_S[row]:
            groups.append(SemanticGroup(-1 - position, np.array([position]), 0.0))
        else:
            members.setdefault(_group_of(keys[row], grouping), []).append(position)
    for group_id, positions in enumerate(members.values()):
        for piece in _pieces(positions, [keys[int(rows[p])] for p in positions], rows_per_cell):
            samples = np.asarray(piece, dtype=np.int64)
            groups.append(SemanticGroup(group_id, samples, workload(samples)))
    return place_groups(groups, num_cells, workload)


def _pieces(positions: list[int], keys: list[RowKey], limit: int) -> list[list[int]]:
    """A group as parts of at most ``limit`` rows: whole if it fits; else trajectories, joined while they fit; a
    trajectory that is longer is cut into consecutive rows."""
    if len(positions) <= limit:
        return [positions]
    sessions: dict[str, list[int]] = {}
    for position, key in zip(positions, keys, strict=True):
        sessions.setdefault(key.session, []).append(position)
    pieces: list[list[int]] = []
    for rows in sessions.values():
        chunks = [rows[i : i + limit] for i in range(0, len(rows), limit)]
        if pieces and len(pieces[-1]) + len(chunks[0]) <= limit:
            pieces[-1] = pieces[-1] + chunks.pop(0)
        pieces += chunks
    return pieces


def _balance(cells: list[IntArray], segments: Segments, max_rounds: int = 64) -> list[IntArray]:
    """Swap rows between the busiest cell and others while that lowers the larger of the two."""
    cells = [cell.copy() for cell in cells]
    loads = np.array([segments.workload(cell) for cell in cells])
    for _ in range(max_rounds):
        busiest = int(loads.argmax())
        swap = _best_swap(cells, loads, busiest, segments)
        if swap is None:
            break
        other, mine, theirs = swap
        cells[busiest][mine], cells[other][theirs] = cells[other][theirs], cells[busiest][mine]
        for cell in (busiest, other):
            loads[cell] = segments.workload(cells[cell])
    return cells


def _best_swap(
    cells: list[IntArray], loads: FloatArray, busiest: int, segments: Segments
) -> tuple[int, int, int] | None:
    """(other cell, row of the busiest, row of the other) with the lowest maximum; None if none lowers it by 1 %."""
    best, found = loads[busiest] * 0.99, None
    for other in np.argsort(loads)[:2].tolist():
        if other == busiest:
            continue
        for mine, theirs in np.ndindex(len(cells[busiest]), len(cells[other])):
            left, right = cells[busiest].copy(), cells[other].copy()
            left[mine], right[theirs] = right[theirs], left[mine]
            result = max(segments.workload(left), segments.workload(right))
            if result < best:
                best, found = result, (other, mine, theirs)
    return found


def _mini_batches(cells: list[IntArray], segments: Segments, num_ranks: int) -> list[list[IntArray]]:
    """Cells of similar workload run at the same time. Mini-batches are then ordered by their first row."""
    loads = [segments.workload(cell) for cell in cells]
    by_load = sorted(range(len(cells)), key=lambda cell: -loads[cell])
    found = [[cells[c] for c in by_load[i : i + num_ranks]] for i in range(0, len(cells), num_ranks)]
    return sorted(found, key=lambda mini_batch: min(int(cell.min()) for cell in mini_batch))


def _assign_ranks(mini_batches: list[list[IntArray]], segments: Segments, cells: Cells) -> IntArray:
    """[ranks, mini-batches, rows] the cells of every mini-batch on ranks that hold what they share: forward-only phases
    run all rows of a rank together."""
    grid = np.empty((cells.num_ranks, cells.num_mini_batches, cells.rows_per_cell), dtype=np.int64)
    held: list[IntArray] = [np.empty(0, dtype=np.int64)] * cells.num_ranks
    for index, mini_batch in enumerate(mini_batches):
        free = list(range(cells.num_ranks))
        for cell in sorted(mini_batch, key=lambda c: -segments.workload(c)):
            added = {rank: segments.workload(np.concatenate([held[rank], cell])) for rank in free}
            alone = {rank: segments.workload(held[rank]) for rank in free}
            rank = min(free, key=lambda r: (round(added[r] - alone[r], 6), alone[r]))
            grid[rank, index] = cell
            held[rank] = np.concatenate([held[rank], cell])
            free.remove(rank)
    return grid


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
