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

_WORTH_SPLITTING = 1.02
"""Imbalance below which no group is split to lower it."""


_SIMILAR = 0.97
"""Cells of which the lighter has at least this share of the heavier's work may run at the same time."""


class RowKey(NamedTuple):
    """A row's key in TransferQueue: ``{uid}_{session}_{index}``."""

    uid: str
    session: str
    step: int
    """Index of the row among those of the session."""

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

    @property
    def critical_path(self) -> float:
        """Workload on the busiest rank of every mini-batch, summed, times the number of ranks."""
        return self.imbalance * self.workload


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
    num_cells = cells.num_ranks * (cells.num_mini_batches if mini_batches is None else 1)
    placed: list[list[IntArray]] = []
    for rows in parts:
        placement = _place(keys, is_padding_S, segments, rows, num_cells, cells.rows_per_cell, grouping)
        placed.append([rows[cell] for cell in placement.cells])

    def finish(parts_of_cells: list[list[IntArray]]) -> RowPlacement:
        grid = np.concatenate([_schedule(found, segments, cells.num_ranks) for found in parts_of_cells], axis=1)
        return evaluate(keys, is_padding_S, segments, cells, grid.reshape(-1), grouping)

    whole = finish(placed)
    if not split_groups or whole.imbalance < _WORTH_SPLITTING:
        return whole
    split = finish([_balance(found, segments) for found in placed])
    return split if split.critical_path < 0.99 * whole.critical_path else whole


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


def _schedule(cells: list[IntArray], segments: Segments, num_ranks: int) -> IntArray:
    """[ranks, mini-batches, rows] when and where each cell runs.

    Cells of similar workload run at the same time. Among those, a rank gets what shares most with its other cells:
    forward-only phases run all rows of a rank together. Mini-batches are ordered by their first row.
    """
    work = [segments.workload(cell) for cell in cells]
    owned = [segments.of(cell) for cell in cells]
    waiting = sorted(range(len(cells)), key=lambda cell: -work[cell])
    held_RV = np.zeros((num_ranks, len(segments.weight_V)), dtype=bool)
    columns: list[list[IntArray]] = []
    while waiting:
        similar = [cell for cell in waiting[: 4 * num_ranks] if work[cell] >= _SIMILAR * work[waiting[0]]]
        candidates = similar if len(similar) >= num_ranks else waiting[:num_ranks]
        column: dict[int, int] = {}
        while len(column) < num_ranks:
            free = [rank for rank in range(num_ranks) if rank not in column]
            rank, cell = _best_pair(segments, held_RV, owned, free, candidates)
            column[rank] = cell
            candidates = [c for c in candidates if c != cell]
            waiting.remove(cell)
            held_RV[rank, owned[cell]] = True
        columns.append([cells[column[rank]] for rank in range(num_ranks)])
    columns.sort(key=lambda column: min(int(cell.min()) for cell in column))
    return np.stack([np.stack(column) for column in columns], axis=1)


def _best_pair(
    segments: Segments, held_RV: np.ndarray, owned: list[IntArray], free: list[int], candidates: list[int]
) -> tuple[int, int]:
    """Rank and cell that share most, less what the cell shares with any other rank; then the rank with least work."""
    shared_CR = np.array([held_RV[:, owned[cell]] @ segments.weight_V[owned[cell]] for cell in candidates])
    work_R = held_RV @ segments.weight_V

    def value(pair: tuple[int, int]) -> tuple[float, float]:
        index, rank = pair
        others = np.delete(shared_CR[index], rank)
        return float(shared_CR[index, rank] - others.max(initial=0.0)), -float(work_R[rank])

    index, rank = max(((index, rank) for rank in free for index in range(len(candidates))), key=value)
    return rank, candidates[index]


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
