#!/usr/bin/env python
"""Shared against unshared replay of several traces, and of samples that share nothing: ratios in one table.

    python benchmarks/replay.py TRACE.jsonl.gz... [--limit 4] [--repeat 3] [--check] [-- further options of psrl replay]

Each trace is one run of ``psrl replay --sharing both`` in a process of its own: the two sides run in turn, seconds are
medians over repeats, and the run fails where log-probs, gradients or metrics differ. A cell reads
``speed-up / ideal (share)``; ideal is the ratio of FLOPs, share is speed-up over ideal. Prints Markdown; ``--json``
keeps every run's full record. What the project promises is marked: at least 0.80 of ideal, without anything shared at
most 3 % slower, planning below 2 % of the update. On a machine that does other work too, ``--cpu-time`` takes the
processor time of the process instead of the time that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = {"old_log_prob": "old log-prob", "ref": "reference", "update": "update"}
MIN_SHARE_OF_IDEAL = 0.80
MIN_UNRELATED_SPEEDUP = 0.97
MAX_PLANNING_SHARE = 0.02
UNRELATED = "unrelated samples"


@dataclass(frozen=True)
class Run:
    name: str
    record: dict[str, Any]
    is_unrelated: bool
    speedup_key: str
    """``speedup`` of elapsed time, or ``cpu_speedup``."""

    def misses(self) -> list[str]:
        """Promises that this run does not keep."""
        found = []
        for phase, label in PHASES.items():
            speedup, ideal = self.record[phase][self.speedup_key], self.record[phase]["ideal_speedup"]
            if self.is_unrelated and speedup < MIN_UNRELATED_SPEEDUP:
                found.append(f"{label}: {1 / speedup - 1:.1%} slower than unshared")
            if not self.is_unrelated and speedup < MIN_SHARE_OF_IDEAL * ideal:
                found.append(f"{label}: {speedup / ideal:.2f} of ideal")
        planning = self.record["update"]["planning_share"]
        if planning >= MAX_PLANNING_SHARE:
            found.append(f"planning: {planning:.1%} of the update")
        return found


def replay(
    files: Sequence[Path],
    options: Sequence[str],
    sharing: str = "both",
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``psrl replay``; returns its JSON record. Exits where the run fails or the sides differ.

    Args:
        variables: further ones of the environment.
    """
    with tempfile.TemporaryDirectory(prefix="psrl_bench_") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "psrl.cli.main", "replay", *map(str, files), "--sharing", sharing]
        command += [*options, "--json", str(result)]
        environment = {**os.environ, **(variables or {})}
        outcome = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if outcome.returncode:
            sys.exit(f"{outcome.stdout}\n{' '.join(command)} failed with exit code {outcome.returncode}")
        return json.loads(result.read_text())


def write_unrelated(path: Path, num_samples: int, num_tokens: int, seed: int) -> None:
    """Samples without a common prefix: random ids, the second half a response."""
    rng = random.Random(seed)
    prompt = num_tokens // 2
    with path.open("w") as stream:
        for index in range(num_samples):
            ids = [index % 512, *(rng.randrange(512) for _ in range(num_tokens - 1))]
            row = {"uid": str(index), "input_ids": ids, "loss_mask": [0] * prompt + [1] * (num_tokens - prompt)}
            stream.write(json.dumps(row) + "\n")


def markdown(runs: Sequence[Run]) -> str:
    header = ["trace", "samples", "tokens", "match", *PHASES.values(), "planning", "promise"]
    rows = [header, ["---"] * len(header)]
    for run in runs:
        record = run.record
        rows.append(
            [
                run.name,
                f"{record['samples']:,}",
                f"{record['tokens']:,}",
                f"{record['prefix_match_rate']:.1%}",
                *(_cell(record[phase][run.speedup_key], record[phase]["ideal_speedup"]) for phase in PHASES),
                f"{record['update']['planning_share']:.2%}",
                "; ".join(run.misses()) or "kept",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(speedup: float, ideal: float) -> str:
    return f"{speedup:.2f} / {ideal:.2f} ({speedup / ideal:.2f})"


def main() -> int:
    argv, further = sys.argv[1:], []
    if "--" in argv:
        argv, further = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--limit", type=int, default=4, help="rows read of each trace")
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repeats; seconds are medians")
    parser.add_argument("--unrelated", type=int, default=16, help="samples of the run that shares nothing; 0: none")
    parser.add_argument("--unrelated-tokens", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="compare processor time instead of elapsed time")
    parser.add_argument("--json", type=Path, help="keep the full records")
    parser.add_argument("--check", action="store_true", help="exit 1 where a promise is not kept")
    args = parser.parse_args(argv)

    options = ["--repeat", str(args.repeat), *further]
    key = "cpu_speedup" if args.cpu_time else "speedup"
    runs = []
    for trace in args.traces:
        name = trace.name.removesuffix(".gz").removesuffix(".jsonl")
        print(f"{name} ...", file=sys.stderr)
        runs.append(Run(name, replay([trace], ["--limit", str(args.limit), *options]), False, key))
    if args.unrelated:
        print(f"{UNRELATED} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="psrl_bench_") as folder:
            path = Path(folder) / "unrelated.jsonl"
            write_unrelated(path, args.unrelated, args.unrelated_tokens, args.seed)
            runs.append(Run(UNRELATED, replay([path], options), True, key))
    print(markdown(runs))
    if args.json is not None:
        args.json.write_text(json.dumps({run.name: run.record for run in runs}, indent=2) + "\n")
    return 1 if args.check and any(run.misses() for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
