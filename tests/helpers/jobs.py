"""Whole commands as a user starts them, each in a process group of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def launch(arguments: list[str], folder: Path, *, max_seconds: float = 900, **environment: str) -> str:
    """Output of ``python -m ARGUMENTS``, run in ``folder``; whatever it leaves behind is ended with it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    with (folder / "job.log").open("w+") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            job.wait(timeout=max_seconds)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read()
    assert job.returncode == 0, output[-8000:]
    return output


PSRL_TRAIN = ("psrl.cli.main", "train")
MAIN_PPO = ("verl.trainer.main_ppo", "--config-dir", str(REPOSITORY / "configs"))


def train(
    job_dir: Path, folder: Path, *overrides: str, command: tuple[str, ...] = PSRL_TRAIN, **environment: str
) -> list[dict[str, float]]:
    """Run ``psrl train`` with the CPU configuration; returns the metrics of every step.

    Args:
        job_dir: has ``model`` and ``data``.
        folder: is made, for the log and ``checkpoints``.
        command: or :data:`MAIN_PPO`, with the variables that it needs in ``environment``.
    """
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    launch(
        [
            *command, "--config-name", "cpu_quickstart", f"job_dir={job_dir}",
            "trainer.logger=[console,file]", f"trainer.default_local_dir={folder}/checkpoints", *overrides,
        ],
        folder,
        VERL_FILE_LOGGER_PATH=str(metrics),
        **environment,
    )  # fmt: skip
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
