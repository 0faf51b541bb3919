"""The KV cache of a plan with transfers: layers of blocks on the device while they are needed, on the host otherwise.

It carries out the plan's schedule, step by step, and refuses any other order. A path is gathered by ``read``; blocks
are not whole in one tensor, so a kernel cannot read them in place.

Shape legend: T tokens of a micro-batch, P path tokens, n tokens of a block, K kv heads of this rank, H head dim (K and
V may differ).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from psrl.cache.host import HOST_POOL, HostPool, Transfers
from psrl.cache.kv_cache import BlockShard, KVCache, KVPair
from psrl.cache.storage import CacheBytes, DeviceTier, accumulator_dtype
from psrl.errors import PlanError
from psrl.tiers import TierSchedule, TierStep, Unit
from psrl.types import ExecutionPlan


class _Form(NamedTuple):
    """What a token's K and V look like."""

    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def dtype_of(self, unit: Unit) -> torch.dtype:
        return accumulator_dtype(self.dtype) if unit.is_grad else self.dtype


class TieredKVCache(KVCache):
    """As ``KVCache``, within the budget that the plan's schedule was made for. A unit is one flat tensor, K then V."""

    lends_blocks = False

    def __init__(
        self,
        plan: ExecutionPlan,
        num_layers: int,
        tier: DeviceTier | None = None,
        shard: BlockShard = BlockShard(),  # noqa: B008  immutable
        *,
        pool: HostPool,
    ) -> None:
        """
        Raises:
            PlanError: the plan has no transfers, or they are for another number of layers.
        """
        super().__init__(plan, num_layers, tier, shard)
        if plan.tiers is None or plan.tiers.num_layers != num_layers:
            raise PlanError(f"the plan has no transfers for {num_layers} layers")
        self._schedule: TierSchedule = plan.tiers
        self._pool = pool
        self._number = -1
        self._is_open = False
        self._form: _Form | None = None
        self._transfers: Transfers | None = None
        self._has_pool = False
        self.host_live_bytes = 0
        self._host_peak, self._bytes_to_host, self._bytes_to_device = 0, 0, 0
        self._units: dict[Unit, Tensor] = {}
        self._copies: dict[Unit, list[Tensor]] = {}
        self._saving: dict[Unit, torch.cuda.Event | None] = {}
        self._arriving: list[torch.cuda.Event | None] = []

    @property
    def bytes(self) -> CacheBytes:
        """So far."""
        return CacheBytes(self.tier.peak_bytes, self._host_peak, self._bytes_to_host, self._bytes_to_device)

    @property
    def num_live_blocks(self) -> int:
        """Units, on either tier."""
        return len(self._units.keys() | self._copies.keys())

    def end_layer(self, micro_batch: int, *, backward: bool) -> bool:
        """One layer of the micro-batch is done: units that nobody needs any more are freed.

        Returns whether it was the last layer, which is the first one's in a backward.
        """
        step = self._schedule.steps[self._number]
        if not self._is_open or (step.micro_batch, step.backward) != (micro_batch, backward):
            raise PlanError(f"micro-batch {micro_batch} ends a layer that it has not begun")
        self._end()
        return step.layer == (0 if backward else self.num_layers - 1)

    def check_drained(self) -> None:
        """Every step has run and every unit has been freed. Gives the host pool back.

        Raises:
            PlanError: steps or units are left after the last micro-batch.
        """
        done, total = self._number + 1, len(self._schedule.steps)
        if self.num_live_blocks or done != total or self._is_open:
            raise PlanError(
                f"{len(self._units)} units on the device and {len(self._copies)} on the host are left after "
                f"{done} of {total} steps"
            )
        self._release_pool()

    def close(self) -> None:
        """Drop everything, wherever the plan stopped. Can be called again."""
        if self._transfers is not None:
            self._transfers.drain()
        self.tier.clear()
        for held in (self._units, self._copies, self._saving, self._arriving):
            held.clear()
        self.host_live_bytes = 0
        self._is_open = False
        self._release_pool()

    def _release_pool(self) -> None:
        if self._has_pool:
            self._has_pool = False
            self._pool.take_back()

    # --------------------------------------------------------------------------------------------------- steps
    def _begin_write(self, micro_batch: int, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> None:
        if self._form is None:
            self._form = _Form(tuple(k_TKH.shape[1:]), tuple(v_TKH.shape[1:]), k_TKH.dtype, k_TKH.device)
        self._open(micro_batch, layer, backward=False)

    def _open(self, micro_batch: int, layer: int, *, backward: bool) -> None:
        """Have the step's units on the device. Calls of the step that is open change nothing."""
        steps = self._schedule.steps
        if self._is_open:
            step = steps[self._number]
            if (step.micro_batch, step.layer, step.backward) == (micro_batch, layer, backward):
                return
            self._end()  # forwards with a backward to come do not say that they end
        self._number += 1
        step = steps[self._number] if self._number < len(steps) else None
        if step is None or (step.micro_batch, step.layer, step.backward) != (micro_batch, layer, backward):
            raise PlanError(
                f"layer {layer} of micro-batch {micro_batch} ({'backward' if backward else 'forward'}) is not what the "
                f"schedule has as step {self._number}: {step and (step.micro_batch, step.layer, step.backward)}"
            )
        self._is_open = True
        self._move(step)

    def _move(self, step: TierStep) -> None:
        transfers = self._ready_transfers()
        for unit, start in step.saves:
            size = self._schedule.unit_bytes(unit)
            self._copies[unit] = self._pool.parts(start, start + size)
            self._saving[unit] = transfers.to_host(self._copies[unit], self._units[unit])
            self._bytes_to_host += size
            self.host_live_bytes += size
            self._host_peak = max(self._host_peak, start + size)
        for unit in step.evicts:
            transfers.wait(self._saving.pop(unit, None))
            self.tier.free(self._units.pop(unit))
        self._arriving += [self._fetch(unit) for unit in step.fetches]
        for unit in step.allocates:
            flat = self._units[unit] = self._empty(unit)
            if unit.is_grad:
                flat.zero_()
        for copied in self._arriving:
            transfers.wait(copied)
        self._arriving = [self._fetch(unit) for unit in step.prefetches]

    def _end(self) -> None:
        step, self._is_open = self._schedule.steps[self._number], False
        for unit in (*step.stale, *step.frees):
            if self._copies.pop(unit, None) is not None:
                self.host_live_bytes -= self._schedule.unit_bytes(unit)
        for unit in step.frees:
            self.tier.free(self._units.pop(unit))

    def _ready_transfers(self) -> Transfers:
        if self._transfers is None:
            assert self._form is not None  # a plan's first step writes
            self._transfers = Transfers(self._form.device)
            if self._schedule.host_pool_bytes:
                self._pool.lend(self._schedule.host_pool_bytes, self._form.device)
                self._has_pool = True
        return self._transfers

    def _fetch(self, unit: Unit) -> torch.cuda.Event | None:
        assert self._transfers is not None
        flat = self._units[unit] = self._empty(unit)
        self._bytes_to_device += self._schedule.unit_bytes(unit)
        return self._transfers.to_device(flat, self._copies[unit])

    # ------------------------------------------------------------------------------------------------- storage
    def _empty(self, unit: Unit) -> Tensor:
        form = self._form
        assert form is not None
        num_values = self._sizes[unit.block] * (prod(form.k_shape) + prod(form.v_shape))
        num_bytes = num_values * form.dtype_of(unit).itemsize
        if num_bytes != self._schedule.unit_bytes(unit):
            raise PlanError(f"{unit} takes {num_bytes} bytes, planned were {self._schedule.unit_bytes(unit)}")
        return self.tier.empty((num_values,), form.dtype_of(unit), form.device)

    def _kv_at(self, block: int, layer: int) -> KVPair:
        return self._pair(Unit(block, layer, False))

    def _grads_at(self, block: int, layer: int) -> KVPair:
        return self._pair(Unit(block, layer, True))

    def _pair(self, unit: Unit) -> KVPair:
        """Views of a unit on the device."""
        form, size = self._form, self._sizes[unit.block]
        assert form is not None
        parts: Sequence[Tensor] = self._units[unit].split([size * prod(form.k_shape), size * prod(form.v_shape)])
        return KVPair(parts[0].view(size, *form.k_shape), parts[1].view(size, *form.v_shape))


def make_cache(plan: ExecutionPlan, num_layers: int, shard: BlockShard) -> KVCache:
    """For what the plan says about the host tier."""
    if plan.tiers is None:
        return KVCache(plan, num_layers, shard=shard)
    return TieredKVCache(plan, num_layers, shard=shard, pool=HOST_POOL)
