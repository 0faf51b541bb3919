"""Which spine micro-batches' attention an update keeps between its passes: those that save most for their bytes."""

from __future__ import annotations

import dataclasses

from psrl.cost import KVFootprint, ModelShape
from psrl.types import ExecutionPlan, MicroBatch


def keep_attention(plan: ExecutionPlan, shape: ModelShape, footprint: KVFootprint) -> ExecutionPlan:
    """``plan`` with as much of its spine's attention kept as the budget has room for beside the cache's peak.

    A plan that keeps some already is decided anew. What keeps none: a forward-only plan, whose spine runs once, and one
    in waves or with a host tier, whose cache fills the budget.
    """
    if plan.forward_only or len(plan.waves) != 1 or plan.tiers is not None:
        return plan
    budget = footprint.budget_bytes
    room = None if budget is None else budget - plan.stats.kv_bytes_peak
    kept = kept_micro_batches(plan, footprint, room)
    pairs = visible_pairs(plan, kept) - visible_pairs(plan, plan.kept_attention)
    stats = dataclasses.replace(
        plan.stats,
        attention_bytes=attention_bytes(plan, footprint, kept),
        flops_shared=plan.stats.flops_shared - pairs * shape.flops_per_pair,
    )
    return dataclasses.replace(plan, kept_attention=kept, stats=stats)


def kept_micro_batches(plan: ExecutionPlan, footprint: KVFootprint, room: int | None) -> frozenset[int]:
    """Spine micro-batches, of most visible keys a query first, whose results take at most ``room`` bytes together.

    Args:
        room: None: there is room for all.
    """
    if not footprint.attention_bytes_per_token:
        return frozenset()
    spine = sorted(
        (mb for mb in plan.micro_batches if mb.is_spine), key=lambda mb: (-mb.visible_pairs / mb.num_tokens, mb.index)
    )
    chosen: list[int] = []
    for mb in spine:
        size = _bytes(mb, footprint)
        if room is None or size <= room:
            chosen.append(mb.index)
            room = None if room is None else room - size
    return frozenset(chosen)


def attention_bytes(plan: ExecutionPlan, footprint: KVFootprint, kept: frozenset[int]) -> int:
    """Of the results of these micro-batches on one rank, which are there together at the end of pass 1."""
    return sum(_bytes(plan.micro_batches[index], footprint) for index in kept)


def visible_pairs(plan: ExecutionPlan, micro_batches: frozenset[int]) -> int:
    """(Query, key) pairs of these micro-batches."""
    return sum(plan.micro_batches[index].visible_pairs for index in micro_batches)


def _bytes(mb: MicroBatch, footprint: KVFootprint) -> int:
    return footprint.stored_tokens(mb.num_tokens) * footprint.attention_bytes_per_token
