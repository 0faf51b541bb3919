"""Seconds of every phase of a step, and where they go.

Shape legend: V virtual stages, M micro-batches, D data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psrl.simulate.costs import CostModel, StageCosts, as_pass, expert_groups
from psrl.simulate.schedule import Pipeline, run_pipelines
from psrl.simulate.sides import SHARED, Batch, Workload
from psrl.simulate.work import PassAmounts, padded_to
from psrl.types import FloatArray

OLD_LOG_PROB, REF, UPDATE = "old_log_prob", "ref", "update"
PHASES = (OLD_LOG_PROB, REF, UPDATE)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase on one side. ``compute`` to ``optimizer`` are shares of all ranks' time and add up to 1."""

    seconds: float
    processor_seconds: FloatArray
    """[D] of the busiest stage of every data-parallel rank: work alone, as if nobody waited."""
    balance: float
    """Mean over the largest time of the data-parallel ranks, weighted over mini-batches."""
    compute: float
    exchange: float
    """Collectives within micro-batches: tensor, context and expert groups."""
    bubble: float
    """Stages of a pipeline that wait for each other."""
    contention: float
    """Processes that wait for a core."""
    wait: float
    """Ranks that wait for the slowest."""
    gradients: float
    """Reduction of gradients and gather of weights."""
    optimizer: float
    num_micro_batches: int
    """Over all data-parallel ranks; of psrl's two passes, both count. Dummies count."""

    def tokens_per_second(self, num_tokens: int) -> float:
        return num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the engine on all ranks: the sum of these is a phase."""

    finish_D: FloatArray
    """Seconds, cores shared."""
    alone_D: FloatArray
    """Seconds, a core for every process."""
    busy_D: FloatArray
    """Mean over the stages."""
    busiest_D: FloatArray
    exchange_D: FloatArray
    num_micro_batches: int


def simulate_phases(costs: CostModel, workload: Workload) -> dict[str, PhaseResult]:
    """All three phases."""
    forward = [list(workload.forward)]
    mini_batches = [list(column) for column in zip(*workload.update, strict=True)]
    return {
        OLD_LOG_PROB: _phase(costs, workload.side, forward, with_entropy=True),
        REF: _phase(costs, workload.side, forward),
        UPDATE: _phase(costs, workload.side, mini_batches, is_update=True),
    }


def _phase(
    costs: CostModel,
    side: str,
    calls: Sequence[Sequence[Batch]],
    *,
    with_entropy: bool = False,
    is_update: bool = False,
) -> PhaseResult:
    done = [_run_call(costs, side, batches, with_entropy) for batches in calls]
    layout, cores = costs.layout, costs.calibration.num_cores
    crowding = 1.0 if cores is None else max(1.0, layout.num_ranks / cores)
    gradients = len(done) * costs.gradient_seconds if is_update else 0.0
    optimizer = len(done) * costs.optimizer_seconds if is_update else 0.0
    slowest = sum(float(call.finish_D.max()) for call in done)
    mean = {
        name: sum(float(getattr(call, name).mean()) for call in done)
        for name in ("finish_D", "alone_D", "busy_D", "exchange_D")
    }
    seconds = slowest + gradients + optimizer * crowding
    return PhaseResult(
        seconds=seconds,
        processor_seconds=np.sum([call.busiest_D for call in done], axis=0) + optimizer,
        balance=mean["alone_D"] / sum(float(call.alone_D.max()) for call in done),
        compute=(mean["busy_D"] - mean["exchange_D"]) / seconds,
        exchange=mean["exchange_D"] / seconds,
        bubble=(mean["alone_D"] - mean["busy_D"]) / seconds,
        contention=(mean["finish_D"] - mean["alone_D"] + optimizer * (crowding - 1)) / seconds,
        wait=(slowest - mean["finish_D"]) / seconds,
        gradients=gradients / seconds,
        optimizer=optimizer / seconds,
        num_micro_batches=sum(call.num_micro_batches for call in done),
    )


def _run_call(costs: CostModel, side: str, batches: Sequence[Batch], with_entropy: bool) -> _Call:
    """One batch of every rank, at the same time."""
    layout, calibration = costs.layout, costs.calibration
    overhead = calibration.shared_call if side == SHARED else calibration.unshared_call
    aligned = _aligned(costs, [batch.passes for batch in batches])
    forwards, backwards = [], []
    for passes in aligned:
        forwards.append([costs.forward(run, overhead, with_entropy=with_entropy) for run in passes])
        backwards.append(
            [costs.backward(run, with_entropy=with_entropy) if run.is_training else None for run in passes]
        )
    size = layout.replicas_per_expert_group
    if size > 1:
        _share_experts(forwards, size)
        _share_experts(backwards, size)
    pipelines = []
    exchange = []
    for batch, passes, forward, backward in zip(batches, aligned, forwards, backwards, strict=True):
        pipelines.append(
            Pipeline(
                tuple(as_pass(f, b) for f, b in zip(forward, backward, strict=True)),
                layout.pipeline,
                layout.chunks,
                costs.transfer_seconds([amounts for run in passes for amounts in run.micro_batches]),
                costs.call_seconds(overhead, batch.num_samples, batch.num_tokens),
            )
        )
        parts = [part for part in (*forward, *backward) if part is not None]
        exchange.append(sum(float(part.exchange.sum()) for part in parts) / layout.pipeline)
    alone_D = np.array([finished.seconds for finished in run_pipelines(pipelines)])
    finish_D = alone_D
    if calibration.num_cores is not None:
        cores = calibration.num_cores / (layout.tensor * layout.context)
        finish_D = np.array([finished.seconds for finished in run_pipelines(pipelines, num_cores=cores)])
    return _Call(
        finish_D=finish_D,
        alone_D=alone_D,
        busy_D=np.array([pipeline.busy_seconds.mean() for pipeline in pipelines]),
        busiest_D=np.array([pipeline.busy_seconds.max() for pipeline in pipelines]),
        exchange_D=np.array(exchange),
        num_micro_batches=sum(len(run.micro_batches) for passes in aligned for run in passes),
    )


def _aligned(costs: CostModel, ranks: Sequence[Sequence[PassAmounts]]) -> list[list[PassAmounts]]:
    """Passes with dummy micro-batches where the layout needs them: interleaved schedules take whole groups, and ranks
    that exchange tokens take equal numbers of everything."""
    layout = costs.layout
    multiple = layout.pipeline if layout.chunks > 1 else 1
    aligned = [
        [padded_to(run, -(-len(run.micro_batches) // multiple) * multiple) for run in passes] for passes in ranks
    ]
    size = layout.replicas_per_expert_group
    if size == 1:
        return aligned
    out: list[list[PassAmounts]] = []
    for start in range(0, len(aligned), size):
        group = aligned[start : start + size]
        out += _equal_passes(group)
    return out


def _equal_passes(group: Sequence[Sequence[PassAmounts]]) -> list[list[PassAmounts]]:
    """Forward-only passes first, then training ones, as many of each as the rank with most has."""
    columns: list[tuple[bool, int]] = []
    ordered = [{flag: [run for run in passes if run.is_training == flag] for flag in (False, True)} for passes in group]
    for flag in (False, True):
        for index in range(max(len(runs[flag]) for runs in ordered)):
            columns.append((flag, index))
    out: list[list[PassAmounts]] = [[] for _ in group]
    for flag, index in columns:
        found = [runs[flag][index] if index < len(runs[flag]) else PassAmounts((), flag) for runs in ordered]
        longest = max(len(run.micro_batches) for run in found)
        for target, run in zip(out, found, strict=True):
            target.append(padded_to(run, longest))
    return out


def _share_experts(ranks: list[list[StageCosts]] | list[list[StageCosts | None]], size: int) -> None:
    """In place: couple every pass of the ranks of an expert group."""
    for start in range(0, len(ranks), size):
        group = ranks[start : start + size]
        for index in range(len(group[0])):
            column = [costs for passes in group if (costs := passes[index]) is not None]
            for passes, shared in zip(group, expert_groups(column, size) if column else [], strict=bool(column)):
                passes[index] = shared
