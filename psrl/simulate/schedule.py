"""Megatron's pipeline schedules as an event simulation: 1F1B, interleaved 1F1B and forward only.

Micro-batches may all differ in length. Order of work is Megatron's own: ``forward_backward_pipelining_*`` and
``get_schedule_table`` of megatron/core/pipeline_parallel/schedules.py.

Shape legend: V virtual stages (chunk-major: stage s of chunk c is c * num_stages + s), M micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from psrl.errors import ConfigError
from psrl.types import FloatArray


class Op(NamedTuple):
    """One forward or backward of a micro-batch through one chunk of a stage."""

    micro_batch: int
    chunk: int
    is_backward: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """One call of a schedule."""

    forward_VM: FloatArray
    """Seconds."""
    backward_VM: FloatArray | None = None
    """None: forward only."""

    @property
    def num_micro_batches(self) -> int:
        return self.forward_VM.shape[1]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The passes that the stages of one pipeline run, one after the other."""

    passes: tuple[Pass, ...]
    num_stages: int
    num_chunks: int = 1
    transfer_seconds: float = 0.0
    """From the end of a forward or backward to its arrival at the next stage."""
    start_seconds: float = 0.0
    """Work of every stage before its first micro-batch."""

    @property
    def busy_seconds(self) -> FloatArray:
        """[stages] seconds of work, that before the first micro-batch included."""
        busy = np.full(self.num_stages, float(self.start_seconds))
        for run in self.passes:
            work_VM = run.forward_VM if run.backward_VM is None else run.forward_VM + run.backward_VM
            busy += work_VM.sum(axis=1).reshape(self.num_chunks, self.num_stages).sum(axis=0)
        return busy


def stage_order(
    num_stages: int, stage: int, num_micro_batches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> list[Op]:
    """What a stage computes, in order.

    Raises:
        ConfigError: several chunks on one stage, or a number of micro-batches that they do not divide into.
    """
    if num_chunks > 1 and num_stages == 1:
        raise ConfigError("virtual pipeline stages need a pipeline of at least 2 stages")
    if num_chunks > 1 and num_micro_batches % num_stages:
        raise ConfigError(f"{num_micro_batches} micro-batches do not divide into groups of {num_stages} stages")
    table = [
        (micro_batch, chunk)
        for first in range(0, num_micro_batches, num_stages if num_chunks > 1 else max(1, num_micro_batches))
        for chunk in range(num_chunks)
        for micro_batch in range(
            first, min(num_micro_batches, first + num_stages) if num_chunks > 1 else num_micro_batches
        )
    ]
    forwards = [Op(micro_batch, chunk, False) for micro_batch, chunk in table]
    if forward_only:
        return forwards
    backwards = [Op(micro_batch, num_chunks - 1 - chunk, True) for micro_batch, chunk in table]
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


@dataclass(frozen=True, slots=True)
class Finished:
    """When the stages of one pipeline are done, seconds from the start."""

    stage_seconds: FloatArray

    @property
    def seconds(self) -> float:
        return float(self.stage_seconds.max())


def run_pipelines(pipelines: Sequence[Pipeline], *, num_cores: float | None = None) -> list[Finished]:
    """Run all pipelines from time 0.

    Args:
        num_cores: processors that all stages of all pipelines share evenly; None: each has its own.
    """
    if num_cores is None:
        return [_EventLoop([pipeline], None).run()[0] for pipeline in pipelines]
    return _EventLoop(pipelines, num_cores).run()


class _Step(NamedTuple):
    """An op with what it takes and where its result goes."""

    seconds: float
    waits_for: tuple[int, int] | None
    """(stage, step) that sends its input."""
    sends: bool
    receives_with_send: bool
    """Its input is received in the same call that sends the result of the step before (one forward, one backward)."""


def _program(pipeline: Pipeline) -> list[list[_Step]]:
    """Steps of every stage, all passes in a row."""
    num_stages, last = pipeline.num_stages, pipeline.num_stages * pipeline.num_chunks - 1
    start = [_Step(pipeline.start_seconds, None, False, False)] if pipeline.start_seconds else []
    program: list[list[_Step]] = [list(start) for _ in range(num_stages)]
    for run in pipeline.passes:
        forward_only = run.backward_VM is None
        orders = [
            stage_order(num_stages, stage, run.num_micro_batches, pipeline.num_chunks, forward_only=forward_only)
            for stage in range(num_stages)
        ]
        place = {
            (op.chunk * num_stages + stage, op.micro_batch, op.is_backward): (stage, len(program[stage]) + index)
            for stage, order in enumerate(orders)
            for index, op in enumerate(order)
        }
        for stage, order in enumerate(orders):
            for index, op in enumerate(order):
                virtual = op.chunk * num_stages + stage
                seconds_VM = run.backward_VM if op.is_backward else run.forward_VM
                assert seconds_VM is not None
                source = virtual + (1 if op.is_backward else -1)
                waits_for = place[source, op.micro_batch, op.is_backward] if 0 <= source <= last else None
                program[stage].append(
                    _Step(
                        float(seconds_VM[virtual, op.micro_batch]),
                        waits_for,
                        virtual > 0 if op.is_backward else virtual < last,
                        index > 0 and order[index - 1].is_backward != op.is_backward,
                    )
                )
    return program if num_stages > 1 else [[_merged(program[0])]]


def _merged(steps: Sequence[_Step]) -> _Step:
    """A pipeline of one stage never waits."""
    return _Step(sum(step.seconds for step in steps), None, False, False)


class _Stage:
    """One stage's progress. ``done`` counts computed steps; the next one starts when input and own send are through."""

    __slots__ = ("done", "finished_at", "pipeline", "remaining", "steps")

    def __init__(self, pipeline: int, steps: list[_Step]) -> None:
        self.pipeline, self.steps = pipeline, steps
        self.done = 0
        self.remaining: float | None = None
        """Seconds of work left of the running step; None: waiting or finished."""
        self.finished_at = 0.0


class _EventLoop:
    """Stages compute, each at full speed or at its share of the cores, and hand results on.

    Plain 1F1B waits for its sends (p2p_communication.py waits for every request), so a transfer begins when both ends
    are there. Interleaved schedules overlap them (``overlap_p2p_comm``): it begins when the sender is done.
    """

    def __init__(self, pipelines: Sequence[Pipeline], num_cores: float | None) -> None:
        self._num_cores = num_cores
        self._pipelines = pipelines
        self._stages = [[_Stage(index, steps) for steps in _program(p)] for index, p in enumerate(pipelines)]
        self._arrivals: dict[tuple[int, int, int], float] = {}
        """(pipeline, stage, step that receives) -> time."""
        self._sent: dict[tuple[int, int, int], float] = {}
        """(pipeline, stage, step that sends) -> time its send is through."""
        self._transfer_ends: list[float] = []
        self._receiver = [
            {step.waits_for: (s, k) for s, stage in enumerate(stages) for k, step in enumerate(stage.steps)
             if step.waits_for is not None}
            for stages in self._stages
        ]  # fmt: skip

    def run(self) -> list[Finished]:
        now, running = 0.0, []
        waiting = [stage for stages in self._stages for stage in stages if stage.steps]
        index_of = {id(stage): (p, s) for p, stages in enumerate(self._stages) for s, stage in enumerate(stages)}
        while waiting or running:
            self._settle(waiting, index_of, now)
            starts = {id(stage): self._start_time(stage, *index_of[id(stage)]) for stage in waiting}
            for stage in [stage for stage in waiting if starts[id(stage)] <= now]:
                stage.remaining = stage.steps[stage.done].seconds
                waiting.remove(stage)
                running.append(stage)
            speed = 1.0 if self._num_cores is None else min(1.0, self._num_cores / max(1, len(running)))
            ends = min((stage.remaining or 0.0 for stage in running), default=np.inf) / speed
            while self._transfer_ends and self._transfer_ends[0] <= now:
                heapq.heappop(self._transfer_ends)
            step = min(ends, self._transfer_ends[0] - now if self._transfer_ends else np.inf)
            assert np.isfinite(step), "the schedule waits for itself"
            now += step
            for stage in running:
                stage.remaining = (stage.remaining or 0.0) - step * speed
            for stage in [stage for stage in running if (stage.remaining or 0.0) <= 1e-12]:
                running.remove(stage)
                stage.remaining = None
                stage.done += 1
                stage.finished_at = now
                if stage.done < len(stage.steps):
                    waiting.append(stage)
        return [Finished(np.array([stage.finished_at for stage in stages])) for stages in self._stages]

    def _settle(self, waiting: list[_Stage], index_of: dict[int, tuple[int, int]], now: float) -> None:
        """Begin every transfer whose ends are ready."""
        for stage in waiting:
            p, s = index_of[id(stage)]
            self._try_transfer(p, stage.steps[stage.done].waits_for, now)
            if stage.done and stage.steps[stage.done - 1].sends:
                self._try_transfer(p, (s, stage.done - 1), now)
        for p, stages in enumerate(self._stages):  # the last step of a stage may still be sending
            for s, stage in enumerate(stages):
                if stage.steps and stage.done == len(stage.steps) and stage.steps[-1].sends:
                    self._try_transfer(p, (s, stage.done - 1), now)

    def _try_transfer(self, p: int, source: tuple[int, int] | None, now: float) -> None:
        if source is None or (p, *source) in self._sent:
            return
        sender, index = source
        to, receives = self._receiver[p][source]
        if self._stages[p][sender].done <= index:
            return
        if self._pipelines[p].num_chunks == 1 and not self._posted(p, to, receives, now):
            return
        ends = now + self._pipelines[p].transfer_seconds
        self._sent[p, sender, index] = self._arrivals[p, to, receives] = ends
        heapq.heappush(self._transfer_ends, ends)

    def _posted(self, p: int, s: int, index: int, now: float) -> bool:
        """Whether the stage has called the receive of its step ``index``."""
        stage = self._stages[p][s]
        if stage.done != index or stage.remaining is not None:
            return False
        if index == 0 or not stage.steps[index - 1].sends or stage.steps[index].receives_with_send:
            return True
        return self._sent.get((p, s, index - 1), np.inf) <= now

    def _start_time(self, stage: _Stage, p: int, s: int) -> float:
        """When the stage's next step can start, as far as is known now (infinite: not known)."""
        step, start = stage.steps[stage.done], 0.0
        if step.waits_for is not None:
            start = self._arrivals.get((p, s, stage.done), np.inf)
        if self._pipelines[p].num_chunks == 1 and stage.done and stage.steps[stage.done - 1].sends:
            start = max(start, self._sent.get((p, s, stage.done - 1), np.inf))
        return start
