"""Whole commands as a user starts them, each in a process group of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from psrl.integrations.verl.job.reaper import descendants, list_processes

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_SECONDS = 900
PSRL_TRAIN = ("psrl.cli.main", "train")
MAIN_PPO = ("verl.trainer.main_ppo", "--config-dir", str(REPOSITORY / "configs"))


class Job(NamedTuple):
    """A command that runs, or has run."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> dict[int, dict[str, float]]:
        """Of a training job: metrics by step."""
        file = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {row["step"]: row["data"] for row in rows}

    def processes(self, pattern: str = "") -> list[int]:
        """The job's processes whose command line, which Ray sets to what runs there, has the pattern."""
        return sorted(
            pid for pid in descendants(self.process.pid, list_processes()) if re.search(pattern, command_line(pid))
        )

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + MAX_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}: {self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in {MAX_SECONDS} seconds: {self.output()[-4000:]}"
            time.sleep(0.01)

    def finish(self, max_seconds: float = MAX_SECONDS) -> int:
        """The exit code; whatever has not ended then is ended."""
        try:
            return self.process.wait(timeout=max_seconds)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def environment(pid: int) -> dict[str, str]:
    """Of a process, as it was started."""
    return dict(variable.split("=", 1) for variable in _read(pid, "environ").split("\0") if "=" in variable)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it ended
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_gone(processes: Iterable[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := set(processes) & list_processes().keys():
        assert time.monotonic() < deadline, {pid: command_line(pid) for pid in left}
        time.sleep(0.2)


def start(command: list[str], folder: Path, *, log: str = "job.log", **variables: str) -> Job:
    """Run a command in ``folder``, beside what the caller does."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    with (folder / log).open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(process, folder, folder / log)


def launch(arguments: list[str], folder: Path, **variables: str) -> str:
    """Output of ``python -m ARGUMENTS``, run in ``folder`` to its end."""
    job = start([sys.executable, "-m", *arguments], folder, **variables)
    assert job.finish() == 0, job.output()[-8000:]
    return job.output()


def start_training(
    job_dir: Path, folder: Path, *overrides: str, command: tuple[str, ...] = PSRL_TRAIN, **variables: str
) -> Job:
    """Start ``psrl train`` with the CPU configuration.

    Args:
        job_dir: has ``model`` and ``data``.
        folder: for the log, metrics and ``checkpoints``; made where it is not.
        command: or :data:`MAIN_PPO`, with the variables that it needs in ``variables``.
    """
    folder.mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    arguments = [
        *command, "--config-name", "cpu_quickstart", f"job_dir={job_dir}",
        "trainer.logger=[console,file]", f"trainer.default_local_dir={folder}/checkpoints", *overrides,
    ]  # fmt: skip
    return start([sys.executable, "-m", *arguments], folder, VERL_FILE_LOGGER_PATH=str(metrics), **variables)


def train(
    job_dir: Path, folder: Path, *overrides: str, command: tuple[str, ...] = PSRL_TRAIN, **variables: str
) -> list[dict[str, float]]:
    """As :func:`start_training`, to the end of the job; returns the metrics of every step."""
    job = start_training(job_dir, folder, *overrides, command=command, **variables)
    assert job.finish() == 0, job.output()[-8000:]
    return list(job.steps().values())


def make_assets(folder: Path, **model: int) -> Path:
    """A tiny model and games for a job in ``folder``; returns it.

    Args:
        model: further arguments of ``make_tiny_chat``.
    """
    from psrl.models.tiny_chat import make_tiny_chat

    make_tiny_chat(folder / "model", hidden=32, **model)
    launch(["psrl.agents.dataset", "textworld", "--out", str(folder / "data"), "--train", "4", "--val", "1"], folder)
    return folder
