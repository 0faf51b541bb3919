"""Simulated ranks: speed-up and balance with and without placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psrl.bench.options import BenchOptions
from psrl.data import ReplaySample
from psrl.model_sizes import load_model
from psrl.simulate.calibration import load_calibration
from psrl.simulate.cluster import ClusterLayout
from psrl.simulate.job import simulate
from psrl.simulate.sides import SHARED, UNSHARED, Sides
from psrl.simulate.trace import make_trace


def scale_ranks(options: BenchOptions, samples: Sequence[ReplaySample], num_ranks: int) -> dict[str, Any]:
    """A step on ``num_ranks`` data-parallel ranks, the trace once for each.

    ``critical_path_gain`` is the busiest rank's work, prefixes shared, in veRL's order of rows over that in psrl's:
    what group-intact placement is worth.
    """
    layout = ClusterLayout(num_ranks, 1, 1, 1, 1, 1)
    calibration = load_calibration(options.calibration)
    trace = make_trace(samples, multiple=num_ranks, replicas=num_ranks)
    sides = Sides(
        trace, load_model(options.simulated_model), layout, calibration.dtype_bytes, 1, options.max_tokens,
        options.max_tokens,
    )  # fmt: skip
    results = simulate(sides, calibration, recompute="full").sides
    ours, theirs = results[SHARED], results[UNSHARED]
    placed, upstream = ours.workload.placement, theirs.workload.placement
    return {
        "ranks": num_ranks,
        "rows": trace.num_rows,
        "speedup": theirs.step_seconds / ours.step_seconds,
        "step_seconds": ours.step_seconds,
        "step_seconds_unshared": theirs.step_seconds,
        "imbalance": placed.imbalance,
        "imbalance_upstream": upstream.imbalance,
        "split_groups": placed.num_split_groups,
        "split_groups_upstream": upstream.num_split_groups,
        "critical_path_gain": upstream.critical_path / placed.critical_path,
    }
