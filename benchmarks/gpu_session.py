#!/usr/bin/env python
"""Everything that a GPU has to show, in one command: doctor, tests, tiles, attention kernels, phases; one report.

    python benchmarks/gpu_session.py TRACE... --tokenizer qwen.tiktoken --out outputs/gpu       # on a GPU node
    python benchmarks/gpu_session.py --cpu --out outputs/gpu_toy                                # toy sizes, without one

Parts run one after the other, each in a process of its own with a log; one that fails does not keep the next from
running. ``session.json`` has all results, ``report.md`` shows them with plots and says which targets were met. Exits
with 1 where a part failed, or, with ``--check``, where a target was missed; the last line names them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_report import targets_of, write_report

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("doctor", "tests", "tune", "attention", "step")
TOY_ATTENTION = ["--device", "cpu", "--dtype", "float32", "--scale", "0.01", "--heads", "2", "1", "--head-dim", "16",
                 "--repeats", "2"]  # fmt: skip
TOY_STEP = ["--model", "tiny", "--max-tokens", "64", "--repeat", "1"]


@dataclass
class Part:
    """One process of the session."""

    name: str
    command: list[str]
    result: Callable[[Path], Any]
    """Reads what the process left: its log is ``NAME.log``, further files have names of its own."""
    outcome: dict[str, Any] = field(default_factory=dict)

    def run(self, out: Path, limit_seconds: float) -> None:
        """Fills ``outcome``: ``failure`` is None, or says what went wrong."""
        start = time.monotonic()
        failure, result = None, None
        with (out / f"{self.name}.log").open("w") as log, (out / f"{self.name}.err").open("w") as errors:
            try:
                code = subprocess.run(
                    self.command, cwd=REPOSITORY, stdout=log, stderr=errors, timeout=limit_seconds
                ).returncode
                failure = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                failure = f"took more than {limit_seconds:g} s"
        try:
            result = self.result(out)
        except (OSError, ValueError, xml.etree.ElementTree.ParseError) as error:
            failure = failure or f"its results cannot be read: {error}"
        if failure is None and isinstance(result, dict):
            failure = result.get("failure")
        self.outcome = {
            "command": self.command,
            "seconds": time.monotonic() - start,
            "failure": failure,
            "result": result,
        }


def read_json(name: str) -> Callable[[Path], Any]:
    return lambda out: json.loads((out / name).read_text())


def read_lines(name: str) -> Callable[[Path], list[str]]:
    return lambda out: (out / name).read_text().splitlines()


def read_tests(needs_gpu: bool) -> Callable[[Path], dict[str, Any]]:
    """Counts of a pytest run. With a GPU, one in which no test ran is a failure."""

    def read(out: Path) -> dict[str, Any]:
        suite = xml.etree.ElementTree.parse(out / "tests.xml").getroot()[0]
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        counts["passed"] = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
        return counts | {"failure": "no test ran" if needs_gpu and not counts["passed"] else None}

    return read


def parts_of(args: argparse.Namespace, out: Path) -> list[Part]:
    python = sys.executable
    tests = [python, "-m", "pytest", "-m", "gpu", "-q", "tests/gpu", "--junitxml", str(out / "tests.xml")]
    attention = [python, "benchmarks/attention.py", "--out", str(out / "attention.json")]
    step = [python, "benchmarks/step.py", *map(str, args.traces), "--out", str(out / "step.json")]
    if args.cpu:
        attention = ["env", "TRITON_INTERPRET=1", *attention, *TOY_ATTENTION]
        step += TOY_STEP
    else:
        step += ["--model", args.model, "--limit", str(args.limit), "--max-tokens", str(args.max_tokens)]
        step += ["--repeat", str(args.repeat)]
    tune = Part("tune", [python, "-m", "psrl.cli.main", "tune", args.model], read_lines("tune.log"))
    step += ["--tokenizer", args.tokenizer]
    if args.textworld:
        step += ["--textworld", str(args.textworld)]
    return [
        Part("doctor", [python, "-m", "psrl.cli.main", "doctor", "--json"], read_json("doctor.log")),
        Part("tests", tests, read_tests(needs_gpu=not args.cpu)),
        *([] if args.cpu else [tune]),
        Part("attention", attention, read_json("attention.json")),
        Part("step", step, read_json("step.json")),
    ]


def write_toy_trace(path: Path) -> None:
    """Token samples of one made-up trajectory of four steps: step t holds all of the earlier ones."""
    history: list[int] = [7] * 40
    with path.open("w") as stream:
        for step in range(4):
            response = [(11 * step + i) % 250 for i in range(30)]
            row = {
                "uid": "toy",
                "input_ids": history + response,
                "loss_mask": [0] * len(history) + [1] * len(response),
            }
            stream.write(json.dumps(row) + "\n")
            history = history + response + [3 + step] * 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="for benchmarks/step.py")
    parser.add_argument("--textworld", type=int, metavar="GAMES", help="generate traces, instead or besides")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything; made if absent")
    parser.add_argument("--cpu", action="store_true", help="toy sizes on the CPU, to see that the session works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--model", default="qwen2.5-1.5b", help="of the parts tune and step")
    parser.add_argument("--tokenizer", default="bytes", help="as benchmarks/step.py")
    parser.add_argument("--max-tokens", type=int, default=8192, help="as benchmarks/step.py")
    parser.add_argument("--limit", type=int, default=8, help="as benchmarks/step.py")
    parser.add_argument("--repeat", type=int, default=5, help="as benchmarks/step.py")
    parser.add_argument("--part-seconds", type=float, default=3600, help="most seconds of a part")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target was missed, too")
    args = parser.parse_args()
    has_step = args.parts is None or "step" in args.parts
    if has_step and not args.cpu and not args.traces and not args.textworld:
        parser.error("name a TRACE, or --textworld GAMES to generate some")
    if args.cpu and args.parts and "tune" in args.parts:
        parser.error("tune needs a GPU")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the report needs matplotlib: pip install 'psrl[plots]'")
    args.traces = [trace.absolute() for trace in args.traces]
    return args


def main() -> int:
    args = _arguments()
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if args.cpu and not args.traces and not args.textworld:
        args.traces = [out / "toy.jsonl"]
        write_toy_trace(args.traces[0])
    parts = [part for part in parts_of(args, out) if args.parts is None or part.name in args.parts]
    for part in parts:
        for name in (f"{part.name}.json", f"{part.name}.xml", f"{part.name}.png"):
            (out / name).unlink(missing_ok=True)  # an earlier session's result is not this one's
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        part.run(out, args.part_seconds)
    session: dict[str, Any] = {
        "is_toy": args.cpu,
        "parts": {part.name: part.outcome for part in parts},
        "failed": [part.name for part in parts if part.outcome["failure"]],
    }
    session["targets"] = targets_of(session["parts"])
    (out / "session.json").write_text(json.dumps(session, indent=2) + "\n")
    write_report(session, out)
    print(out / "report.md")
    missed = [target["name"] for target in session["targets"] if not target["is_met"]]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    if session["failed"]:
        print(f"failed: {', '.join(session['failed'])}", file=sys.stderr)
    return 1 if session["failed"] or (args.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
