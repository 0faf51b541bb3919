"""What each side computes in a step: psrl's placement and plans, or veRL's own order and micro-batches.

Shape legend: S rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from psrl.cost import KVFootprint
from psrl.grouping import select_samples
from psrl.model_sizes import ModelSizes
from psrl.placement.cells import Cells
from psrl.placement.orchestrator import RowPlacement, evaluate, place_rows
from psrl.placement.segments import Segments, segments_from_tokens
from psrl.placement.upstream import upstream_order
from psrl.planner import build_plan
from psrl.simulate.cluster import ClusterLayout
from psrl.simulate.partition import upstream_micro_batches
from psrl.simulate.trace import SimulatedTrace
from psrl.simulate.work import PassAmounts, shared_passes, unshared_pass
from psrl.types import IntArray, PlanStats

SHARED, UNSHARED = "psrl", "verl"


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the engine on one data-parallel rank: a mini-batch, or all rows of a forward-only phase."""

    num_samples: int
    num_tokens: int
    """Of the samples, shared or not."""
    passes: tuple[PassAmounts, ...]
    stats: PlanStats | None
    """Without sharing: None."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All batches of a side; outer index: data-parallel rank."""

    side: str
    forward: tuple[Batch, ...]
    update: tuple[tuple[Batch, ...], ...]
    """By rank, then mini-batch."""
    placement: RowPlacement
    placement_seconds: float
    """That finding the order took here."""
    planning_seconds: float
    """Mean over ranks of all plans of a step, here."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Makes the workloads of one trace on one layout.

    Raises:
        ConfigError: the rows do not divide into the grid, or veRL cannot cut them.
        MemoryBudgetError: the budget of the cache cannot hold what a sample has beyond a micro-batch.
    """

    trace: SimulatedTrace
    model: ModelSizes
    layout: ClusterLayout
    dtype_bytes: int
    num_mini_batches: int
    max_tokens: int
    infer_max_tokens: int
    kv_cache_bytes: int | None = None

    @property
    def cells(self) -> Cells:
        return Cells.of(self.trace.num_rows, self.layout.data, self.trace.num_rows // self.num_mini_batches)

    def segments(self) -> Segments:
        return segments_from_tokens(self.trace.token_rows(), self.trace.position_rows())

    def shared(self, segments: Segments) -> Workload:
        """psrl's."""
        start = time.perf_counter()
        trace, cells = self.trace, self.cells
        placement = place_rows(
            trace.keys,
            trace.is_padding_S,
            segments,
            cells,
            grouping="tokens",
            split_groups=True,
            upstream_S=self._upstream_order(),
        )
        placed = time.perf_counter()
        grid = cells.split(placement.order_S)
        forward = tuple(self._planned(rank.reshape(-1), forward_only=True) for rank in grid)
        update = tuple(tuple(self._planned(cell, forward_only=False) for cell in rank) for rank in grid)
        planned = time.perf_counter()
        return Workload(SHARED, forward, update, placement, placed - start, (planned - placed) / self.layout.data)

    def unshared(self, segments: Segments) -> Workload:
        """veRL's."""
        start = time.perf_counter()
        cells = self.cells
        order = self._upstream_order()
        placed = time.perf_counter()
        grid = cells.split(order)
        forward = self._packed([rank.reshape(-1) for rank in grid], self.infer_max_tokens, is_training=False)
        columns = [
            self._packed(list(grid[:, index]), self.max_tokens, is_training=True)
            for index in range(self.num_mini_batches)
        ]
        update = tuple(tuple(column[rank] for column in columns) for rank in range(self.layout.data))
        return Workload(
            UNSHARED, tuple(forward), update, self._evaluated(order, segments), placed - start,
            (time.perf_counter() - placed) / self.layout.data,
        )  # fmt: skip

    def _upstream_order(self) -> IntArray:
        return upstream_order(self.trace.samples.seqlens_S, self.layout.data)

    def _evaluated(self, order_S: IntArray, segments: Segments) -> RowPlacement:
        return evaluate(self.trace.keys, self.trace.is_padding_S, segments, self.cells, order_S, "tokens")

    def _planned(self, rows: IntArray, *, forward_only: bool) -> Batch:
        model, layout = self.model, self.layout
        layers = layout.layers_of_stages(model)
        most_layers = max(sum(layers[stage :: layout.pipeline]) for stage in range(layout.pipeline))
        footprint = KVFootprint.of_values(
            most_layers * model.cached_values(layout.tensor),
            self.dtype_bytes,
            self.kv_cache_bytes,
            layout.context,
            most_layers * model.shape.attention_bytes(self.dtype_bytes, layout.tensor),
        )
        samples = select_samples(self.trace.samples, np.sort(rows))
        plan = build_plan(
            samples,
            max_tokens=(self.infer_max_tokens if forward_only else self.max_tokens) * layout.context,
            shape=model.shape,
            footprint=footprint,
            forward_only=forward_only,
            recompute=True,
        )
        return Batch(samples.num_samples, samples.num_tokens, tuple(shared_passes(plan)), plan.stats)

    def _packed(self, ranks: list[IntArray], max_tokens: int, *, is_training: bool) -> list[Batch]:
        seqlens = self.trace.samples.seqlens_S
        lengths = [seqlens[rows] for rows in ranks]
        multiple = self.layout.pipeline if self.layout.chunks > 1 else 1
        cuts = upstream_micro_batches(lengths, max_tokens * self.layout.context, multiple)
        return [
            Batch(
                len(rows),
                int(seqlens[rows].sum()),
                (unshared_pass(self.trace.samples, cut, is_training=is_training, rows=rows),),
                None,
            )
            for rows, cut in zip(ranks, cuts, strict=True)
        ]
