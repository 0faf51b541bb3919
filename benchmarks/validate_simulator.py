#!/usr/bin/env python
"""Predicted against measured step times of 1, 2 and 4 processes, phase by phase.

    python benchmarks/validate_simulator.py TRACE.jsonl.gz [--calibration OUT.json] [--limit 8] [--ranks 1 2 4]

The simulator places and plans the trace's rows for each number of ranks; as many processes then run exactly these rows
through veRL's worker, both sides in turn, and medians over repeats are compared. ``processor`` is the busiest rank's
processor time, which other work on the machine disturbs least; ``elapsed`` is the time until the slowest rank is done,
predicted for a machine that does nothing else. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script

from benchmarks.calibrate import (  # noqa: E402
    VOCABULARY,
    Sizes,
    calibration_of,
    observed_medians,
    recipe_cases,
    write_model,
)
from benchmarks.measured_ranks import Case, Job, Measurement, measure  # noqa: E402
from psrl.data import ReplaySample, load_samples, load_tokenizer  # noqa: E402
from psrl.simulate.calibration import Calibration, load_calibration  # noqa: E402
from psrl.simulate.cluster import ClusterLayout  # noqa: E402
from psrl.simulate.job import Simulation, simulate  # noqa: E402
from psrl.simulate.phases import PHASES  # noqa: E402
from psrl.simulate.report import PHASE_NAMES  # noqa: E402
from psrl.simulate.sides import SHARED, Sides  # noqa: E402
from psrl.simulate.trace import make_trace  # noqa: E402


class Compared(NamedTuple):
    """One phase. Seconds."""

    layout: ClusterLayout
    side: str
    phase: str
    predicted: float
    """Processor time of the busiest rank."""
    measured: float
    predicted_elapsed: float
    measured_elapsed: float

    @property
    def error(self) -> float:
        """Of the processor time."""
        return self.predicted / self.measured - 1

    @property
    def elapsed_error(self) -> float:
        return self.predicted_elapsed / self.measured_elapsed - 1


def compare(
    samples: Sequence[ReplaySample],
    sizes: Sizes,
    calibration: Calibration | None,
    *,
    layout: ClusterLayout,
    mini_batches: int,
    max_tokens: int,
    repeats: int,
) -> list[Compared]:
    """Simulate and measure one layout. Rows that do not divide over the grid are left out.

    Args:
        calibration: None: calibrate in the same processes, on ``recipe_cases`` that take turns with the samples, so
            that both see the machine at the same speed.
    """
    multiple = layout.data * mini_batches
    recipes, cases = recipe_cases(layout.data) if calibration is None else ([], [])
    rows = tuple(samples[: len(samples) // multiple * multiple])
    used = calibration or load_calibration("h100-estimate")  # placement does not depend on it
    sides = Sides(make_trace(rows, multiple=multiple), sizes.model, layout, 4, mini_batches, max_tokens, max_tokens)
    simulation = simulate(sides, used)
    longest = max(sample.num_tokens for sample in rows)
    num_recipes = len(cases)
    for name, side in simulation.sides.items():
        grid = sides.cells.split(side.workload.placement.order_S) + len(recipes)
        placed = tuple(tuple(rank.reshape(-1).tolist()) for rank in grid)
        cases.append(Case(name, name, placed, mini_batches, max_tokens if name == SHARED else max(max_tokens, longest)))
    with tempfile.TemporaryDirectory(prefix="psrl_validate_") as folder:
        model, tokenizer = write_model(sizes, Path(folder))
        job = Job(str(model), str(tokenizer), (*recipes, *rows), tuple(cases), repeats, layout)
        measured = measure(job, timeout=3600.0)
    if calibration is None:
        observed = [
            found
            for rank in measured
            for found in observed_medians(rank, cases[:num_recipes], sizes.model, "processor", layout.data)
        ]
        simulation = simulate(sides, calibration_of(observed, [sizes], clock="processor", name="same processes"))
    chosen = [[m for m in rank if m.case >= num_recipes] for rank in measured]
    return [_compared(simulation, cases, chosen, name, phase) for name in simulation.sides for phase in PHASES]


def _compared(
    simulation: Simulation, cases: Sequence[Case], ranks: Sequence[list[Measurement]], side: str, phase: str
) -> Compared:
    chosen = [[m for m in rank if cases[m.case].side == side and m.phase == phase] for rank in ranks]
    predicted = simulation.sides[side].phases[phase]
    planned = predicted.num_micro_batches
    # Every rank of a model-parallel group runs the same micro-batches.
    ran = sum({rank[0].data_rank: len(rank[0].micro_batches) for rank in chosen}.values())
    if planned != ran:
        raise RuntimeError(f"{side}, {phase}: {planned} micro-batches were predicted, {ran} ran")
    return Compared(
        layout=simulation.costs.layout,
        side=side,
        phase=phase,
        predicted=float(predicted.processor_seconds.max()),
        measured=max(statistics.median(m.times.cpu for m in rank) for rank in chosen),
        predicted_elapsed=predicted.seconds,
        measured_elapsed=statistics.median(max(m.times.wall for m in same) for same in zip(*chosen, strict=True)),
    )


def layout_name(layout: ClusterLayout) -> str:
    """``DP 2, PP 2``: sizes above 1."""
    sizes = {
        "DP": layout.data, "TP": layout.tensor, "PP": layout.pipeline, "VPP": layout.chunks, "CP": layout.context,
        "EP": layout.expert,
    }  # fmt: skip
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def markdown(found: Sequence[Compared]) -> str:
    header = [
        "layout", "side", "phase", "predicted, processor", "measured", "error",
        "predicted, elapsed", "measured", "error",
    ]  # fmt: skip
    rows = [header, ["---"] * len(header)]
    for c in found:
        processor = [f"{c.predicted:.3f} s", f"{c.measured:.3f} s", f"{c.error:+.1%}"]
        elapsed = [f"{c.predicted_elapsed:.3f} s", f"{c.measured_elapsed:.3f} s", f"{c.elapsed_error:+.1%}"]
        rows.append([layout_name(c.layout), c.side, PHASE_NAMES[c.phase], *processor, *elapsed])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--calibration", help="if not given, calibrate in the processes that are measured")
    parser.add_argument("--limit", type=int, default=8, help="rows read of the input")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    for name in ("tp", "pp", "vpp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    loaded = load_samples(args.traces, tokenizer=lambda: load_tokenizer("bytes"), limit=args.limit)
    samples = [s for s in loaded.samples if int(s.input_ids_N.max()) < VOCABULARY]
    for ranks in args.ranks:
        found = compare(
            samples,
            Sizes(args.hidden, args.layers),
            None if args.calibration is None else load_calibration(args.calibration),
            layout=ClusterLayout(ranks, args.tp, args.pp, args.vpp, args.cp),
            mini_batches=args.mini_batches,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
        )
        lines = markdown(found).split("\n")
        print("\n".join(lines if ranks == args.ranks[0] else lines[2:]), flush=True)


if __name__ == "__main__":
    main()
