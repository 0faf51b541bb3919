#!/usr/bin/env python
"""Shared against unshared replay of a trace under several parallel layouts: ratios beside their ideals in one table.

    python benchmarks/layouts.py TRACE.jsonl.gz [--layouts 1 tp=2 dp=2 pp=2] [--limit 4] [--check] [-- OPTIONS]

Each layout is one run of ``psrl replay --sharing both`` on processes of its own: both sides have the layout and run in
turn, seconds are medians over repeats, and the run fails where log-probs or gradients differ. Ideal is the ratio of
FLOPs. With pipeline stages it is the ratio of FLOPs stretched by the bubbles of the schedules: a call with m
micro-batches on p stages lasts (m + p - 1) / m of its work, and sharing leaves fewer micro-batches. Prints Markdown;
``--check`` fails below 0.80 of ideal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__:
    from benchmarks.replay import MIN_SHARE_OF_IDEAL, PHASES, replay
else:
    from replay import MIN_SHARE_OF_IDEAL, PHASES, replay

DEFAULT_LAYOUTS = ("1", "tp=2", "dp=2", "pp=2")
_BACKWARD = 2.0
"""FLOPs of a backward, in those of its forward."""


def layout_options(layout: str) -> list[str]:
    """``tp=2,pp=2`` as options of replay; ``1`` is one process."""
    if layout == "1":
        return []
    pairs = [part.partition("=") for part in layout.split(",")]
    return [word for axis, _, size in pairs for word in (f"--{axis}", size)]


def num_stages(layout: str) -> int:
    options = layout_options(layout)
    return int(options[options.index("--pp") + 1]) if "--pp" in options else 1


def ideal_speedup(phase: Mapping[str, Any], num_mini_batches: int, stages: int) -> float:
    """Ratio of FLOPs, with the bubbles of both sides' schedules.

    Args:
        phase: a phase of replay's record.
        num_mini_batches: calls of the schedule on the unshared side; the shared side has one more each for its spine.
    """

    def stretched(num_micro_batches: int) -> float:
        per_call = num_micro_batches / num_mini_batches
        return (per_call + stages - 1) / per_call if per_call else 1.0

    last_pass = phase["micro_batches"]
    first_pass = phase["forwards_shared"] - last_pass
    first, last = phase["spine_tokens"], phase["unique_tokens"] * (1.0 + _BACKWARD)
    if not first_pass:  # forward only, or without a spine
        first = 0
    shared = (first * stretched(first_pass) + last * stretched(last_pass)) / (first + last)
    return phase["ideal_speedup"] * stretched(phase["forwards_unshared"]) / shared


def table_rows(
    layout: str, record: Mapping[str, Any], num_mini_batches: int, speedup_key: str
) -> tuple[list[str], list[float]]:
    """The row of a layout, and the share of the ideal of each phase."""
    cells, shares = [layout], []
    for phase in PHASES:
        values = record[phase]
        ideal = ideal_speedup(values, num_mini_batches if phase == "update" else 1, num_stages(layout))
        shares.append(values[speedup_key] / ideal)
        cells.append(f"{values[speedup_key]:.2f} / {ideal:.2f} ({shares[-1]:.2f})")
    return cells, shares


def main(argv: Sequence[str]) -> int:
    further: Sequence[str] = []
    if "--" in argv:
        argv, further = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--layouts", nargs="+", default=DEFAULT_LAYOUTS)
    parser.add_argument("--limit", type=int, default=4, help="rows read of the trace")
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repeats; seconds are medians")
    parser.add_argument("--mini-batches", type=int, default=1, help="that the options of replay make of the samples")
    parser.add_argument("--cpu-time", action="store_true", help="compare processor time instead of elapsed time")
    parser.add_argument("--json", type=Path, help="keep the full records")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below {MIN_SHARE_OF_IDEAL:.2f} of ideal")
    args = parser.parse_args(argv)

    header = ["layout", *PHASES.values()]
    rows, records, worst = [header, ["---"] * len(header)], {}, 1.0
    for layout in args.layouts:
        print(f"{layout} ...", file=sys.stderr)
        options = ["--limit", str(args.limit), "--repeat", str(args.repeat), *layout_options(layout), *further]
        records[layout] = replay([args.trace], options)
        cells, shares = table_rows(
            layout, records[layout], args.mini_batches, "cpu_speedup" if args.cpu_time else "speedup"
        )
        rows.append(cells)
        worst = min(worst, *shares)
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=2) + "\n")
    return 1 if args.check and worst < MIN_SHARE_OF_IDEAL else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
