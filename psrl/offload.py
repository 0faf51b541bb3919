"""The transfer schedule of a plan whose cache exceeds the device's budget: what moves to the host and back, and when.

All uses are known, so the unit that leaves the device is the one whose next use is farthest away (Belady, 1966). K/V
do not change, so a unit that has been copied to the host once is dropped for nothing afterwards; accumulators are
copied again after every change. A copy to the host starts right after the unit's last change, and what the next step
needs is fetched while a step runs, where there is room: so a transfer has a layer's computation to hide behind.

Nothing is split: a unit moves whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psrl.cost import KVFootprint
from psrl.errors import MemoryBudgetError
from psrl.host_pool import place
from psrl.tiers import HostTier, Save, TierSchedule, TierStep, Unit
from psrl.types import KVBlock, MicroBatch, Wave

_NEVER = 1 << 60


class Access(NamedTuple):
    """The units of a step."""

    micro_batch: int
    layer: int
    backward: bool
    reads: tuple[Unit, ...]
    """That exist already."""
    creates: tuple[Unit, ...]
    changes: tuple[Unit, ...]
    """Those of both whose content is new after the step."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.reads + self.creates


def schedule_transfers(
    micro_batches: Sequence[MicroBatch],
    blocks: Sequence[KVBlock],
    waves: Sequence[Wave],
    footprint: KVFootprint,
    host: HostTier,
) -> TierSchedule | MemoryBudgetError:
    """Keep the cache within ``footprint.budget_bytes`` on the device.

    Args:
        waves: the order of execution. A pipeline of several stages does not keep to it.

    Returns:
        the schedule, or the error that says why there is none: a single step exceeds the budget, or the copies exceed
        ``host.budget_bytes``.
    """
    if footprint.kv_bytes_per_token % host.num_layers or footprint.grad_bytes_per_token % host.num_layers:
        raise ValueError(f"the bytes of a token must spread evenly over {host.num_layers} layers, got {footprint}")
    tokens = [footprint.stored_tokens(block.num_tokens) for block in blocks]
    kv, grad = (
        tuple(n * (per_token // host.num_layers) for n in tokens)
        for per_token in (footprint.kv_bytes_per_token, footprint.grad_bytes_per_token)
    )
    budget = _NEVER if footprint.budget_bytes is None else footprint.budget_bytes
    schedule = _Simulation(list(accesses(micro_batches, waves, host)), kv, grad, budget, host).run()
    if isinstance(schedule, TierSchedule) and schedule.host_pool_bytes > host.budget_bytes:
        return MemoryBudgetError(
            f"within psrl.kv_cache_bytes={budget:,} the plan needs {schedule.host_pool_bytes:,} bytes of host memory, "
            f"but psrl.kv_host_bytes allows {host.budget_bytes:,}: raise psrl.kv_host_bytes, "
            "psrl.kv_cache_bytes, or psrl.max_tokens so that fewer tokens are cached"
        )
    return schedule


def accesses(micro_batches: Sequence[MicroBatch], waves: Sequence[Wave], host: HostTier) -> Iterator[Access]:
    """Every step that needs a unit, in order."""
    live_grads: set[int] = set()
    visits = host.visits()
    for wave in waves:
        for index in wave.pass1:
            mb = micro_batches[index]
            for layer in range(host.num_layers):
                own = tuple(Unit(block, layer, False) for block in mb.own_blocks)
                path = tuple(Unit(block, layer, False) for block in mb.path_blocks)
                if own or path:
                    yield Access(index, layer, False, path, own, own)
        for index in wave.pass2:
            mb = micro_batches[index]
            new = [block for block in mb.path_blocks if block not in live_grads]
            old = [block for block in mb.path_blocks if block in live_grads]
            live_grads.update(new)
            live_grads.difference_update(mb.own_blocks)
            for layer, backward in visits:
                if backward:
                    created, added = ([Unit(block, layer, True) for block in part] for part in (new, old))
                    own = [Unit(block, layer, True) for block in mb.own_blocks]
                    access = Access(index, layer, True, (*added, *own), (*created,), (*added, *created))
                else:
                    path = tuple(Unit(block, layer, False) for block in mb.path_blocks)
                    access = Access(index, layer, False, path, (), ())
                if access.reads or access.creates:
                    yield access


@dataclass(slots=True)
class _Draft:
    """A step while it is being decided."""

    saves: list[Unit] = field(default_factory=list[Unit])
    evicts: list[Unit] = field(default_factory=list[Unit])
    fetches: list[Unit] = field(default_factory=list[Unit])
    prefetches: list[Unit] = field(default_factory=list[Unit])
    frees: list[Unit] = field(default_factory=list[Unit])
    stale: list[Unit] = field(default_factory=list[Unit])
    kv_bytes: int = 0
    grad_bytes: int = 0


class _Simulation:
    """Follows the accesses, deciding what leaves the device. Use once."""

    def __init__(
        self, steps: list[Access], kv: tuple[int, ...], grad: tuple[int, ...], budget: int, host: HostTier
    ) -> None:
        self._steps, self._budget, self._host = steps, budget, host
        self._bytes = (kv, grad)
        self._drafts = [_Draft() for _ in steps]
        self._next_uses = _next_uses(steps)
        self._live = [0, 0]  # bytes on the device: K/V, accumulators
        self._rank: dict[Unit, int] = {}
        """Of units on the device: the smallest leaves first."""
        self._heap: list[tuple[int, Unit]] = []
        self._changed: dict[Unit, int] = {}
        """Step of the last change."""
        self._copied: set[Unit] = set()
        """Units whose content the host has, or will have by the time it is needed."""

    def run(self) -> TierSchedule | MemoryBudgetError:
        for number, access in enumerate(self._steps):
            draft, needed = self._drafts[number], set(access.units)
            missing = [unit for unit in access.reads if unit not in self._rank]
            if not self._make_room(number, sum(self._size(unit) for unit in (*missing, *access.creates)), needed):
                return _step_error(access, sum(self._size(unit) for unit in needed), self._budget)
            for unit in missing:
                self._enter(unit, number, draft.fetches)
            for unit in access.creates:
                self._enter(unit, number, None)
            if number + 1 < len(self._steps):
                self._prefetch(number, needed)
            draft.kv_bytes, draft.grad_bytes = self._live
            self._finish(number, access)
        return self._schedule()

    def _size(self, unit: Unit) -> int:
        return self._bytes[unit.is_grad][unit.block]

    def _enter(self, unit: Unit, number: int, record: list[Unit] | None) -> None:
        """On the device now. Until it is used it counts as used in this step."""
        if record is not None:
            record.append(unit)
        self._live[unit.is_grad] += self._size(unit)
        self._rank[unit] = number
        heapq.heappush(self._heap, (number, unit))

    def _prefetch(self, number: int, needed: set[Unit]) -> None:
        coming = self._steps[number + 1]
        kept = needed.union(coming.reads)
        for unit in coming.reads:
            if unit in self._rank:
                continue
            if not self._make_room(number, self._size(unit), kept, may_wait=False):
                return
            self._enter(unit, number, self._drafts[number].prefetches)

    def _make_room(self, number: int, size: int, kept: set[Unit], *, may_wait: bool = True) -> bool:
        """Evict units until ``size`` more bytes fit; False where the units that may leave are not enough.

        Args:
            may_wait: else only units leave that are copied by then.
        """
        victims = self._victims(number, size, kept, may_wait=may_wait)
        if victims is None:
            return False
        self._evict(number, victims)
        return True

    def _victims(self, number: int, size: int, kept: set[Unit], *, may_wait: bool) -> list[Unit] | None:
        """Units to evict, in order; None where those that may go are not enough."""
        excess = sum(self._live) + size - self._budget
        chosen: list[Unit] = []
        passed: dict[Unit, int] = {}
        while excess > 0 and self._heap:
            rank, unit = heapq.heappop(self._heap)
            if self._rank.get(unit) != rank or unit in passed:
                continue  # it has left, has been used since, or is there twice
            passed[unit] = rank
            if unit in kept or not (may_wait or unit in self._copied or self._changed[unit] + 1 < number):
                continue
            chosen.append(unit)
            excess -= self._size(unit)
        for unit, rank in passed.items():
            heapq.heappush(self._heap, (rank, unit))
        if excess > 0:
            return None
        for unit in reversed(chosen):  # a large one may have made small ones needless
            if excess + self._size(unit) <= 0:
                excess += self._size(unit)
                chosen.remove(unit)
        return chosen

    def _evict(self, number: int, units: Sequence[Unit]) -> None:
        for unit in units:
            self._drafts[number].evicts.append(unit)
            self._live[unit.is_grad] -= self._size(unit)
            del self._rank[unit]
            if unit not in self._copied:
                self._copied.add(unit)
                self._drafts[self._changed[unit] + 1].saves.append(unit)

    def _finish(self, number: int, access: Access) -> None:
        draft = self._drafts[number]
        for unit in access.changes:
            self._changed[unit] = number
            if unit in self._copied:
                self._copied.remove(unit)
                draft.stale.append(unit)
        for unit, coming in zip(access.units, self._next_uses[number], strict=True):
            if coming == _NEVER:
                draft.frees.append(unit)
                self._live[unit.is_grad] -= self._size(unit)
                del self._rank[unit]
                self._copied.discard(unit)
            else:
                self._rank[unit] = rank = -coming if self._host.policy == "belady" else number
                heapq.heappush(self._heap, (rank, unit))

    def _schedule(self) -> TierSchedule:
        drafts, size = self._drafts, self._size
        pool = place([(d.saves, [*d.stale, *d.frees]) for d in drafts], size)
        places = zip(pool.starts, pool.bytes_in_use, strict=True)
        steps = tuple(
            TierStep(
                access.micro_batch, access.layer, access.backward,
                tuple(Save(unit, start) for unit, start in zip(draft.saves, starts, strict=True)),
                tuple(draft.evicts), tuple(draft.fetches), access.creates, tuple(draft.prefetches),
                tuple(draft.frees), tuple(draft.stale), draft.kv_bytes, draft.grad_bytes, host_bytes,
            )
            for access, draft, (starts, host_bytes) in zip(self._steps, drafts, places, strict=True)
        )  # fmt: skip
        return TierSchedule(
            num_layers=self._host.num_layers,
            policy=self._host.policy,
            kv_unit_bytes=self._bytes[0],
            grad_unit_bytes=self._bytes[1],
            steps=steps,
            device_bytes_peak=max((step.kv_bytes + step.grad_bytes for step in steps), default=0),
            host_pool_bytes=pool.size,
            bytes_to_host=sum(size(unit) for d in drafts for unit in d.saves),
            bytes_to_device=sum(size(unit) for d in drafts for unit in (*d.fetches, *d.prefetches)),
        )


def _next_uses(steps: Sequence[Access]) -> list[list[int]]:
    """For every step and each of its units, the next step that needs it, or ``_NEVER``."""
    coming: dict[Unit, int] = {}
    out: list[list[int]] = []
    for number in range(len(steps) - 1, -1, -1):
        units = steps[number].units
        out.append([coming.get(unit, _NEVER) for unit in units])
        coming.update(dict.fromkeys(units, number))
    return out[::-1]


def _step_error(access: Access, needed: int, budget: int) -> MemoryBudgetError:
    error = MemoryBudgetError(
        f"one layer of micro-batch {access.micro_batch} and its root path needs {needed:,} bytes of K/V or gradients "
        f"on the device at once, but psrl.kv_cache_bytes allows {budget:,}: raise psrl.kv_cache_bytes, or raise "
        "psrl.max_tokens so that fewer tokens are cached"
    )
    error.micro_batch = access.micro_batch
    return error
