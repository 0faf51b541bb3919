"""A plan laid out in time, with the cache's bytes. Durations are predicted FLOPs.

Shape legend: P path keys, T local tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psrl.blocks import BlockLedger
from psrl.cost import KVFootprint, ModelShape, Work
from psrl.tiers import TierSchedule, TierStep
from psrl.types import ExecutionPlan, MicroBatch


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a micro-batch: forward only in pass 1, forward and backward in pass 2."""

    micro_batch: int
    wave: int
    backward: bool
    start: float
    """FLOPs of all executions before it."""
    flops: float
    writes: tuple[int, ...]
    """Blocks whose K/V are stored."""
    reads: tuple[int, ...]
    new_grads: tuple[int, ...]
    """Blocks that get gradient accumulators."""
    freed_kv: tuple[int, ...]
    freed_grads: tuple[int, ...]
    kv_bytes: int
    """While it runs: its writes are in, nothing that it ends is freed yet."""
    grad_bytes: int
    kv_bytes_after: int
    grad_bytes_after: int
    host_bytes: int = 0
    """Most that the host holds while it runs. With a host tier the bytes above are those of the device's fullest step,
    a layer at a time."""
    bytes_to_host: int = 0
    bytes_to_device: int = 0

    @property
    def end(self) -> float:
        return self.start + self.flops

    @property
    def bytes(self) -> int:
        return self.kv_bytes + self.grad_bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """All executions in order."""

    executions: tuple[Execution, ...]

    @property
    def peak_bytes(self) -> int:
        return max((e.bytes for e in self.executions), default=0)

    @property
    def flops(self) -> float:
        return self.executions[-1].end if self.executions else 0.0


def make_timeline(plan: ExecutionPlan, shape: ModelShape, footprint: KVFootprint) -> Timeline:
    """Follow a plan.

    Args:
        shape, footprint: those that the plan was made with; then ``peak_bytes`` is ``plan.stats.kv_bytes_peak``.
    """
    ledger = BlockLedger(plan.blocks, plan.micro_batches, plan.forward_only, plan.cache)
    tokens = [footprint.stored_tokens(plan.cache.room(block.num_tokens)) for block in plan.blocks]

    def live() -> tuple[int, int]:
        kv = footprint.kv_bytes_per_token * sum(tokens[b] for b in ledger.live_kv)
        return kv, footprint.grad_bytes_per_token * sum(tokens[b] for b in ledger.live_grads)

    executions: list[Execution] = []
    tiers = None if plan.tiers is None else _TierBytes(plan.tiers)
    start = 0.0
    for number, wave in enumerate(plan.waves):
        for backward, order in ((False, wave.pass1), (True, wave.pass2)):
            for index in order:
                mb = plan.micro_batches[index]
                writes = ledger.write(index, backward=backward)
                new_grads = ledger.begin_backward(index) if backward else ()
                during = live()
                freed = ledger.end(index, backward=backward)
                bytes_ = (*during, *live()) if tiers is None else tiers.of(mb, backward=backward)
                keeps = index in plan.kept_attention
                flops = micro_batch_flops(mb, shape, backward=backward, keeps_attention=keeps)
                executions.append(
                    Execution(
                        index, number, backward, start, flops, writes, mb.path_blocks, new_grads, freed.kv,
                        freed.grads, *bytes_,
                    )
                )  # fmt: skip
                start += flops
    return Timeline(tuple(executions))


class _TierBytes:
    """Bytes of executions from the steps of a schedule, in order."""

    def __init__(self, schedule: TierSchedule) -> None:
        self._schedule, self._next = schedule, 0
        self._after = (0, 0)

    def of(self, mb: MicroBatch, *, backward: bool) -> tuple[int, int, int, int, int, int, int]:
        """The last seven fields of the next execution, which is the micro-batch's."""
        steps = self._take(mb, backward=backward)
        if not steps:
            kv, grad = self._after
            return kv, grad, kv, grad, 0, 0, 0
        fullest = max(steps, key=lambda step: step.kv_bytes + step.grad_bytes)
        last, size = steps[-1], self._schedule.unit_bytes
        freed = [sum(size(unit) for unit in last.frees if unit.is_grad == is_grad) for is_grad in (False, True)]
        kv_after, grad_after = self._after = (last.kv_bytes - freed[0], last.grad_bytes - freed[1])
        return (
            fullest.kv_bytes, fullest.grad_bytes, kv_after, grad_after, max(step.host_bytes for step in steps),
            sum(size(save.unit) for step in steps for save in step.saves),
            sum(size(unit) for step in steps for unit in (*step.fetches, *step.prefetches)),
        )  # fmt: skip

    def _take(self, mb: MicroBatch, *, backward: bool) -> Sequence[TierStep]:
        steps, start = self._schedule.steps, self._next
        most = len(steps) if backward else start + self._schedule.num_layers  # its pass 2 may follow at once
        while self._next < min(most, len(steps)) and steps[self._next].micro_batch == mb.index:
            self._next += 1
        return steps[start : self._next]


def micro_batch_flops(mb: MicroBatch, shape: ModelShape, *, backward: bool, keeps_attention: bool = False) -> float:
    """FLOPs of one run.

    Args:
        keeps_attention: pass 1 has kept what attention's forward makes, so that the run with a backward does not.
    """
    work = Work(mb.num_tokens, mb.visible_pairs, len(mb.rows_R), mb.path_len)
    if not backward:
        return shape.forward_flops(work)
    forward = replace(work, pairs=0) if keeps_attention else work
    return shape.forward_flops(forward) + shape.backward_flops(work)
