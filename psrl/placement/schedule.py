"""Which cells run at the same time, and on which rank.

Shape legend: R ranks, M mini-batches, V segments, C cells, K segments of all cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.placement.segments import Segments
from psrl.types import FloatArray, IntArray

_SIMILAR = 0.97
"""Cells of which the lighter has at least this share of the heavier's work may run at the same time."""
_LONGER = 1.002
"""How much longer the critical path may get for cells that share to meet on one rank."""

Columns = list[list[IntArray]]
"""[M][R] rows of every cell."""


def by_work(cells: Sequence[IntArray], segments: Segments, num_ranks: int) -> Columns:
    """Cells of one work run at the same time, the heaviest first: the shortest critical path of given cells."""
    order = np.argsort([-segments.workload(cell) for cell in cells], kind="stable").tolist()
    return [[cells[cell] for cell in order[i : i + num_ranks]] for i in range(0, len(cells), num_ranks)]


def schedule(columns: Columns, segments: Segments, *, may_regroup: bool, limit: float) -> IntArray:
    """[ranks, mini-batches, rows] when and where each cell runs.

    A rank gets what shares most with its other cells: forward-only phases run all rows of a rank together.

    Args:
        columns: cells of every mini-batch.
        segments: what the rows share.
        may_regroup: cells may change their mini-batches; these are then ordered by their first row.
        limit: longest critical path that is allowed for that.
    """
    num_ranks = len(columns[0])
    cells = [cell for column in columns for cell in column]
    work_C = np.array([segments.workload(cell) for cell in cells])
    given = [list(range(i, i + num_ranks)) for i in range(0, len(cells), num_ranks)]
    chosen = _assign(cells, work_C, segments, num_ranks, given)
    if may_regroup:
        regrouped = _assign(cells, work_C, segments, num_ranks, None)
        if _critical(work_C, regrouped) <= min(limit, _LONGER * _critical(work_C, chosen)):
            chosen = regrouped
        chosen.sort(key=lambda column: min(int(cells[cell].min()) for cell in column))
    return np.stack([np.stack([cells[cell] for cell in column]) for column in chosen], axis=1)


def _critical(work_C: FloatArray, columns: Sequence[Sequence[int]]) -> float:
    return float(sum(work_C[list(column)].max() for column in columns))


def _assign(
    cells: Sequence[IntArray], work_C: FloatArray, segments: Segments, num_ranks: int, given: list[list[int]] | None
) -> list[list[int]]:
    """[M][R] cells of every mini-batch by rank; of ``given`` mini-batches, or of cells of similar work."""
    owned = [segments.of(cell) for cell in cells]
    held_RV = np.zeros((num_ranks, len(segments.weight_V)), dtype=bool)
    waiting = sorted(range(len(cells)), key=lambda cell: -work_C[cell])
    columns: list[list[int]] = []
    for index in range(len(cells) // num_ranks):
        if given is None:
            similar = [cell for cell in waiting[: 4 * num_ranks] if work_C[cell] >= _SIMILAR * work_C[waiting[0]]]
            candidates = similar if len(similar) >= num_ranks else waiting[:num_ranks]
        else:
            candidates = given[index]
        column = _match([owned[cell] for cell in candidates], held_RV, segments.weight_V)
        columns.append([candidates[chosen] for chosen in column])
        for cell in columns[-1]:
            waiting.remove(cell)
    return columns


def _match(owned: list[IntArray], held_RV: np.ndarray, weight_V: FloatArray) -> list[int]:
    """Candidate of every rank: one after the other the pair that shares most, less what the candidate shares with any
    other rank; of equal ones that of the rank with least work. Adds the chosen cells to what the ranks hold."""
    num_ranks, num_candidates = len(held_RV), len(owned)
    segment_K = np.concatenate(owned)
    candidate_K = np.repeat(np.arange(num_candidates), [len(segments) for segments in owned])

    def shared(rank: int) -> FloatArray:
        held_K = weight_V[segment_K] * held_RV[rank, segment_K]
        return np.bincount(candidate_K, held_K, minlength=num_candidates).astype(float)

    shared_CR = np.stack([shared(rank) for rank in range(num_ranks)], axis=1)
    work_R = held_RV @ weight_V
    chosen_R = np.full(num_ranks, -1)
    is_open_CR = np.ones((num_candidates, num_ranks), dtype=bool)
    for _ in range(num_ranks):
        second_C, first_C = np.sort(np.pad(shared_CR, ((0, 0), (1, 0))), axis=1)[:, -2:].T
        others_CR = np.where(shared_CR == first_C[:, None], second_C[:, None], first_C[:, None])
        value_CR = np.where(is_open_CR, shared_CR - others_CR, -np.inf)
        best = np.argwhere(value_CR == value_CR.max())
        candidate, rank = best[np.lexsort((best[:, 0], best[:, 1], work_R[best[:, 1]]))[0]].tolist()
        chosen_R[rank] = candidate
        is_open_CR[candidate] = is_open_CR[:, rank] = False
        held_RV[rank, owned[candidate]] = True
        shared_CR[:, rank] = shared(rank)
        work_R[rank] = held_RV[rank] @ weight_V
    return chosen_R.tolist()
