"""Invariant checker of transfer schedules: is everything where a step needs it, within every budget?

It trusts nothing of the scheduler. It knows what a step needs from the plan alone, follows the transfers, and keeps the
content of every unit as a number that changes: a copy is of use only while it is the latest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from psrl.cost import KVFootprint
from psrl.errors import PlanError
from psrl.host_pool import ALIGNMENT
from psrl.tiers import HostTier, TierSchedule, TierStep, Unit
from psrl.types import ExecutionPlan


def check_transfers(plan: ExecutionPlan, footprint: KVFootprint, host: HostTier) -> None:
    """Verify ``plan.tiers`` against the plan and its budgets.

    Raises:
        PlanError: the first invariant that does not hold, by name.
    """
    schedule = plan.tiers
    if schedule is None:
        raise PlanError("the plan has no transfers")
    replay = _Replay(plan, schedule, footprint, host)
    steps = iter(schedule.steps)
    for turn in _turns(plan, host):
        step = next(steps, None)
        _require(step is not None, f"no step for {turn}")
        assert step is not None
        _require((step.micro_batch, step.layer, step.backward) == turn, f"step {step} instead of {turn}")
        replay.run(step)
    _require(next(steps, None) is None, "a step too many")
    replay.check_end()
    found = (replay.device_peak, replay.pool_end, replay.to_host, replay.to_device)
    stats = plan.stats
    wanted = (schedule.device_bytes_peak, schedule.host_pool_bytes, schedule.bytes_to_host, schedule.bytes_to_device)
    _require(found == wanted, f"predicted bytes {wanted}, replayed {found}")
    told = (stats.kv_bytes_peak, stats.kv_host_bytes_peak, stats.kv_bytes_to_host, stats.kv_bytes_to_device)
    _require(told == wanted, f"scheduled bytes {wanted}, the plan's figures {told}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _turns(plan: ExecutionPlan, host: HostTier) -> Iterator[tuple[int, int, bool]]:
    """(micro-batch, layer, backward) of everything that uses the cache, as the model's layers run."""
    layers = range(host.num_layers)
    first_of = {group[-1]: group for group in host.repeats}
    for wave in plan.waves:
        for index in wave.pass1:
            mb = plan.micro_batches[index]
            yield from ((index, layer, False) for layer in layers if mb.path_blocks or mb.own_blocks)
        for index in wave.pass2:
            mb = plan.micro_batches[index]
            turns: list[tuple[int, int, bool]] = [(index, layer, False) for layer in layers]
            for layer in reversed(layers):
                turns += [(index, again, False) for again in first_of.get(layer, ())]
                turns.append((index, layer, True))
            once = [turn for number, turn in enumerate(turns) if not number or turns[number - 1] != turn]
            yield from (t for t in once if mb.path_blocks or (t[2] and mb.own_blocks))


@dataclass
class _Replay:
    plan: ExecutionPlan
    schedule: TierSchedule
    footprint: KVFootprint
    host: HostTier
    version: Counter[Unit] = field(default_factory=Counter[Unit])
    """Of units that are alive: how often they have changed."""
    device: dict[Unit, int] = field(default_factory=dict[Unit, int])
    """Version of each unit on the device."""
    copies: dict[Unit, tuple[int, int, int]] = field(default_factory=dict[Unit, tuple[int, int, int]])
    """Version, begin and end of each unit's copy."""
    written: set[Unit] = field(default_factory=set[Unit])
    device_peak: int = 0
    pool_end: int = 0
    to_host: int = 0
    to_device: int = 0

    def run(self, step: TierStep) -> None:
        where = f"step of layer {step.layer} of micro-batch {step.micro_batch}"
        for unit, start in step.saves:
            self._save(unit, start, where)
        for unit in step.evicts:
            _require(unit in self.device, f"{where} evicts {unit}, which is not on the device")
            _require(self.copies.get(unit, (None,))[0] == self.version[unit], f"{where} loses {unit}")
            del self.device[unit]
        for unit in step.fetches:
            self._fetch(unit, where)
        for unit in step.allocates:
            _require(unit not in self.version, f"{where} allocates {unit} twice")
            self.version[unit] = 0
            self.device[unit] = 0
        for unit in step.prefetches:
            self._fetch(unit, where)
        self._use(step, where)
        self._count(step, where)
        self._close(step, where)

    def _save(self, unit: Unit, start: int, where: str) -> None:
        _require(unit in self.device, f"{where} saves {unit}, which is not on the device")
        _require(unit not in self.copies, f"{where} saves {unit} twice")
        stop = start + self._size(unit)
        _require(start % ALIGNMENT == 0 and stop <= self.host.budget_bytes, f"{where}: place of {unit}")
        _require(all(stop <= a or b <= start for _, a, b in self.copies.values()), f"{where}: {unit} overlaps another")
        self.copies[unit] = (self.version[unit], start, stop)
        self.pool_end = max(self.pool_end, stop)
        self.to_host += self._size(unit)

    def _fetch(self, unit: Unit, where: str) -> None:
        _require(unit not in self.device, f"{where} fetches {unit}, which is on the device")
        _require(unit in self.copies, f"{where} fetches {unit}, which the host has not got")
        self.device[unit] = self.copies[unit][0]
        self.to_device += self._size(unit)

    def _use(self, step: TierStep, where: str) -> None:
        mb = self.plan.micro_batches[step.micro_batch]
        path = [Unit(block, step.layer, step.backward) for block in mb.path_blocks]
        own = [Unit(block, step.layer, step.backward) for block in mb.own_blocks]
        writes = not step.backward and not set(own) <= self.written
        used = [*path, *own] if step.backward or writes else path
        for unit in used:
            _require(unit in self.device, f"{where} needs {unit}")
            _require(self.device[unit] == self.version[unit], f"{where} uses an old {unit}")
        changed = own if writes else path if step.backward else []
        for unit in changed:
            self.version[unit] += 1
            self.device[unit] += 1
        self.written.update(own if writes else ())
        old = {unit for unit in changed if unit in self.copies}
        _require(set(step.stale) == old, f"{where}: copies that are of no use any more")
        done = set(step.frees)
        _require(done <= set(used), f"{where} frees what it does not use")
        if step.backward:
            _require(done == set(own), f"{where}: accumulators end with their own backward")

    def _count(self, step: TierStep, where: str) -> None:
        by_kind = [sum(self._size(u) for u in self.device if u.is_grad == is_grad) for is_grad in (False, True)]
        _require(by_kind == [step.kv_bytes, step.grad_bytes], f"{where}: bytes on the device")
        budget = self.footprint.budget_bytes
        _require(budget is None or sum(by_kind) <= budget, f"{where} exceeds the budget of the device")
        self.device_peak = max(self.device_peak, sum(by_kind))
        _require(sum(self._size(unit) for unit in self.copies) == step.host_bytes, f"{where}: bytes on the host")

    def _close(self, step: TierStep, where: str) -> None:
        for unit in step.stale:
            del self.copies[unit]
        for unit in step.frees:
            _require(unit in self.device, f"{where} frees {unit}, which is not on the device")
            del self.device[unit], self.version[unit]
            self.copies.pop(unit, None)

    def check_end(self) -> None:
        _require(not self.device and not self.copies and not self.version, "units are never freed")

    def _size(self, unit: Unit) -> int:
        per_token = self.footprint.grad_bytes_per_token if unit.is_grad else self.footprint.kv_bytes_per_token
        tokens = self.footprint.stored_tokens(self.plan.blocks[unit.block].num_tokens)
        size = tokens * per_token // self.host.num_layers
        _require(size == self.schedule.unit_bytes(unit), f"bytes of {unit}")
        return size
