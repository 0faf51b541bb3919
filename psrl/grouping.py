"""Semantic groups, and where they are placed.

A group is the set of samples of one prompt or trajectory. Its effective workload counts every distinct prefix once, so
a group kept whole on one (rank, mini-batch) cell costs what sharing leaves of it; a split group computes the prefix of
the split again. Placement keeps veRL's rule that every cell has the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from psrl.cost import CostFunction
from psrl.errors import ConfigError
from psrl.tree import build_tree
from psrl.types import FloatArray, IntArray, SampleBatch

Workload = Callable[[IntArray], float]
"""Effective workload of some samples (indices, ascending) when they share one cell."""


@dataclass(frozen=True, slots=True)
class SemanticGroup:
    """Samples that share a prompt or a trajectory: the unit of placement."""

    group_id: int
    samples: IntArray
    workload: float

    @property
    def num_samples(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class Placement:
    """Samples per cell, and the cells' effective workloads."""

    cells: tuple[IntArray, ...]
    workloads: FloatArray
    num_split_groups: int

    @property
    def imbalance(self) -> float:
        """Largest workload of a cell over the mean."""
        return float(self.workloads.max() / self.workloads.mean()) if self.workloads.any() else 1.0


def select_samples(batch: SampleBatch, samples: IntArray) -> SampleBatch:
    """The chosen samples as a batch of their own."""
    lengths = batch.seqlens_S[samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(offsets[-1], dtype=np.int64) + np.repeat(batch.cu_seqlens[samples] - offsets[:-1], lengths)
    return SampleBatch(
        token_ids_N=batch.token_ids_N[tokens],
        position_ids_N=batch.position_ids_N[tokens],
        cu_seqlens=offsets.astype(np.int64),
        target_mask_N=batch.target_mask_N[tokens],
        group_ids_S=batch.group_ids_S[samples],
        temperatures_S=batch.temperatures_S[samples],
        extra_inputs_NK=None if batch.extra_inputs_NK is None else batch.extra_inputs_NK[tokens],
    )


def effective_workload(batch: SampleBatch, cost: CostFunction) -> Workload:
    """Workload of a set of samples: forward cost of its unique tokens, the pairs they see, and its logit rows."""

    def workload(samples: IntArray) -> float:
        chosen = select_samples(batch, samples)
        tree = build_tree(chosen)
        sources = tree.index_N[np.flatnonzero(chosen.target_mask_N) - 1]
        return cost(tree.num_tokens, int((tree.depth_U + 1).sum()), len(np.unique(sources)))

    return workload


def semantic_groups(batch: SampleBatch, workload: Workload) -> list[SemanticGroup]:
    """Groups by ``group_ids_S``, in order of first appearance."""
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(batch.group_ids_S.tolist()):
        members.setdefault(group, []).append(sample)
    return [
        SemanticGroup(group, indices := np.asarray(samples, dtype=np.int64), workload(indices))
        for group, samples in members.items()
    ]


def place_groups(groups: Sequence[SemanticGroup], num_cells: int, workload: Workload) -> Placement:
    """Longest-first onto the least loaded cell that has room. Every cell gets the same number of rows.

    A group is split only where no cell has room for all of it; then the roomiest cell takes consecutive samples, which
    share most, and the rest is placed as a group of its own.

    Raises:
        ConfigError: the rows do not divide evenly over the cells.
    """
    num_rows = sum(group.num_samples for group in groups)
    if num_cells < 1 or num_rows % num_cells:
        raise ConfigError(f"{num_rows} samples do not divide over {num_cells} cells of equal size")
    room = np.full(num_cells, num_rows // num_cells, dtype=np.int64)
    loads = np.zeros(num_cells)
    cells: list[list[int]] = [[] for _ in range(num_cells)]
    split: set[int] = set()
    waiting = sorted(groups, key=lambda g: (g.workload, g.num_samples))
    while waiting:
        group = waiting.pop()
        fitting = np.flatnonzero(room >= group.num_samples)
        if not len(fitting):
            split.add(group.group_id)
            taken = int(room.max())
            parts = (group.samples[:taken], group.samples[taken:])
            waiting += [SemanticGroup(group.group_id, part, workload(part)) for part in parts]
            waiting.sort(key=lambda g: (g.workload, g.num_samples))
            continue
        cell = int(fitting[np.argmin(loads[fitting])])
        cells[cell] += group.samples.tolist()
        room[cell] -= group.num_samples
        loads[cell] += group.workload
    return Placement(tuple(np.asarray(sorted(c), dtype=np.int64) for c in cells), loads, len(split))
