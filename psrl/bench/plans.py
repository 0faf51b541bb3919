"""What plans say without running: bytes over time by system and block size, and how even micro-batches are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from psrl.analyze.shapes import ShapedModel
from psrl.bench.options import ABLATIONS, COMPARED, HALF
from psrl.cost import KVFootprint, ModelShape
from psrl.data import ReplaySample
from psrl.errors import MemoryBudgetError
from psrl.plan_view.job import batch_of
from psrl.plan_view.timeline import Timeline, make_timeline
from psrl.planner import build_plan
from psrl.systems import SYSTEMS, UNSHARED, System, paged

BLOCK_SIZES = (16, 64, 256)
WAVES = "psrl in waves"
_NO_CURVE = (UNSHARED, "psrl", HALF, "no_kept_attention")
"""Has no K/V, comes anyway, depends on others, or has psrl's K/V."""
_SHARES = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Of psrl's peak: budgets that are tried until one is too small."""
_POINTS = 200


def half_budget(
    samples: Sequence[ReplaySample], shape: ModelShape, footprint: KVFootprint, max_tokens: int
) -> int | None:
    """Bytes: half of what the lesser of the paged and the radix cache takes in an update. None: they cache nothing."""
    whole = batch_of(samples)

    def peak(system: System) -> int:
        batch = system.prepare(whole, max_tokens)
        plan = build_plan(batch, max_tokens=max_tokens, shape=shape, footprint=footprint, system=system)
        return plan.stats.kv_bytes_peak

    return min(peak(SYSTEMS[name]) for name in ("paged", "radix")) // 2 or None


def byte_curves(samples: Sequence[ReplaySample], model: ShapedModel, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Of every system that keeps K/V, and of psrl with blocks of other sizes: bytes over the update's FLOPs."""
    systems = [SYSTEMS[name] for name in dict.fromkeys((*COMPARED, *ABLATIONS)) if name not in _NO_CURVE]
    blocks = [paged(f"blocks of {size}", "", size, serves=False) for size in BLOCK_SIZES]
    curves = {
        system.name: _curve(system, samples, model, max_tokens, None) for system in (SYSTEMS["psrl"], *systems, *blocks)
    }
    curves[WAVES] = curves["psrl"]
    for share in _SHARES:
        try:
            budget = max(1, int(share * curves["psrl"]["peak"]))
            curves[WAVES] = _curve(SYSTEMS["psrl"], samples, model, max_tokens, budget)
        except MemoryBudgetError:
            break
    return curves


def _curve(
    system: System, samples: Sequence[ReplaySample], model: ShapedModel, max_tokens: int, budget_bytes: int | None
) -> dict[str, Any]:
    batch = system.prepare(batch_of(samples), max_tokens)
    # Of kept attention no system has any here: it is psrl's, and beside the cache.
    footprint = dataclasses.replace(model.footprint, budget_bytes=budget_bytes, attention_bytes_per_token=0)
    plan = build_plan(batch, max_tokens=max_tokens, shape=model.shape, footprint=footprint, system=system)
    timeline = make_timeline(plan, model.shape, model.footprint)
    forward = build_plan(
        batch, max_tokens=max_tokens, shape=model.shape, footprint=footprint, forward_only=True, system=system
    )
    kv = np.asarray([e.kv_bytes for e in timeline.executions])
    grads = np.asarray([e.grad_bytes for e in timeline.executions])
    ends = np.asarray([e.end for e in timeline.executions]) / timeline.flops
    chosen = np.unique(np.linspace(0, len(kv) - 1, min(_POINTS, len(kv))).astype(int))
    return {
        "kv_peak": int(kv.max(initial=0)),
        "kv_peak_forward": forward.stats.kv_bytes_peak,
        "peak": int((kv + grads).max(initial=0)),
        "tokens_computed": plan.stats.unique_tokens,
        "blocks": len(plan.blocks),
        "waves": plan.stats.num_waves,
        "largest_micro_batch": max(mb.num_tokens for mb in plan.micro_batches),
        "speedup_by_flops": plan.stats.ideal_speedup,
        "spread_by_flops": _spread(timeline),
        "time": [0.0, *ends[chosen].tolist()],
        "kv_bytes": [0, *kv[chosen].tolist()],
    }


def _spread(timeline: Timeline) -> float:
    """Standard deviation over mean of the backward micro-batches' FLOPs."""
    flops = np.asarray([e.flops for e in timeline.executions if e.backward])
    return float(flops.std() / flops.mean())
