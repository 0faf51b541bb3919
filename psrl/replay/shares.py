"""Which rows of a worker's call a data-parallel rank gets, and where their targets belong.

Shape legend: M targets of all samples, m of this rank's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from psrl.data import ReplaySample, padding_of
from psrl.types import IntArray


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's rows of a call, mini-batch by mini-batch, equally many on every rank."""

    samples: tuple[ReplaySample, ...]
    """With padding, which has no target, where rows do not divide evenly."""
    targets_m: IntArray
    """Place of each target among those of all samples of the replay."""
    num_padded: int
    """Rows of a mini-batch over all ranks, padding included."""


def share_of(
    samples: Sequence[ReplaySample], rows: slice, mini_batch: int, cu_targets: IntArray, rank: int, size: int
) -> Share:
    """Rows of data-parallel rank ``rank`` of ``size``: of each mini-batch a block of neighbours.

    Args:
        rows: of the call, among ``samples``.
        mini_batch: rows of a mini-batch; divides the call's.
        cu_targets: [S + 1] offsets of the samples in the targets.
    """
    per_rank = -(-mini_batch // size)
    chosen: list[ReplaySample] = []
    targets: list[IntArray] = [np.empty(0, dtype=np.int64)]
    for start in range(rows.start, rows.stop, mini_batch):
        first = start + rank * per_rank
        for row in range(first, first + per_rank):
            if row < start + mini_batch:
                chosen.append(samples[row])
                targets.append(np.arange(cu_targets[row], cu_targets[row + 1]))
            else:
                chosen.append(padding_of(samples[start]))
    return Share(tuple(chosen), np.concatenate(targets), per_rank * size)
