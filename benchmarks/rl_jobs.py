"""What the benchmarks of whole RL jobs share: commands with a log file, and the metrics of a job's steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

Steps = list[dict[str, float]]
"""Metrics of every step of a job, in veRL's names."""


def run_module(arguments: Sequence[str], log: Path, **environment: str) -> None:
    """Run ``python -m ARGUMENTS``; its output goes to ``log``. Exits with the log's end where it fails."""
    print(f"$ python -m {' '.join(arguments)}", file=sys.stderr, flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{end}\n{log}: failed with exit code {done.returncode}")


def run_job(folder: Path, name: str, overrides: Sequence[str]) -> Steps:
    """Run ``psrl train`` with the CPU configuration on ``folder``'s model and data.

    Args:
        folder: has ``data``; gets ``NAME.log`` and ``NAME.jsonl``.
    """
    metrics = folder / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    own = [f"job_dir={folder}", f"trainer.experiment_name={name}", "trainer.logger=[console,file]"]
    command = ["psrl.cli.main", "train", "--config-name", "cpu_quickstart", *own, *overrides]
    run_module(command, folder / f"{name}.log", VERL_FILE_LOGGER_PATH=str(metrics))
    return read_steps(metrics)


def read_steps(metrics: Path) -> Steps:
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]


def middle(steps: Steps, key: str) -> float:
    """Median of a metric over steps."""
    return median(step[key] for step in steps)
