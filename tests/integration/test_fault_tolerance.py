"""kill -9 of a worker, a rollout server and the driver in the middle of a step, and the same losses afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from psrl.integrations.verl.durable_checkpoint import find_latest
from psrl.integrations.verl.reaper import descendants, list_processes
from psrl.models.tiny_chat import make_tiny_chat

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_SECONDS = 900
STEPS = 4
SETTINGS = [
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "+agents.max_turns=3",
    "trainer.save_freq=1",
    # A random model earns nothing: the entropy makes gradients, which depend on what was sampled.
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    # Its place in the schedule is part of what a checkpoint must bring back.
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_decay_style=linear",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=20",
    "actor_rollout_ref.actor.optim.lr_decay_steps=100",
]
SAME = ("actor/loss", "actor/entropy_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr", "psrl/tokens")
UPDATE, SAVE = "WorkerDict.*update_actor", "WorkerDict.*save_checkpoint"


class Job(NamedTuple):
    process: subprocess.Popen[bytes]
    folder: Path

    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        file = self.folder / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {row["step"]: row["data"] for row in rows}

    def output(self) -> str:
        return (self.folder / "job.log").read_text(errors="replace")

    def processes(self, pattern: str) -> list[int]:
        """The job's processes whose command line, which Ray sets to what runs there, has the pattern."""
        return sorted(
            pid for pid in descendants(self.process.pid, list_processes()) if re.search(pattern, command(pid))
        )

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + MAX_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}: {self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in {MAX_SECONDS} seconds: {self.output()[-4000:]}"
            time.sleep(0.01)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:  # it ended
        return ""


def start(assets: Path, folder: Path, *overrides: str) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    with (folder / "job.log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "psrl.cli.main", "train", "--config-name", "cpu_quickstart", f"job_dir={assets}",
                "trainer.logger=[console,file]", f"trainer.default_local_dir={folder}/checkpoints",
                f"trainer.total_training_steps={STEPS}", *SETTINGS, *overrides,
            ],
            cwd=folder,
            env={
                **kept,
                "PYTHONPATH": str(REPOSITORY),
                "OMP_NUM_THREADS": "1",
                "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return Job(process, folder)


def finish(job: Job) -> int:
    """The exit code of a job, which is ended if it does not end."""
    try:
        return job.process.wait(timeout=MAX_SECONDS)
    finally:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)


def whole(assets: Path, folder: Path, *overrides: str) -> Job:
    job = start(assets, folder, *overrides)
    assert finish(job) == 0, job.output()[-8000:]
    return job


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_tiny_chat(folder / "model", hidden=32)
    subprocess.run(
        [sys.executable, "-m", "psrl.agents.dataset", "textworld", "--out", str(folder / "data"), "--train", "4",
         "--val", "1"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True, timeout=MAX_SECONDS,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def uninterrupted(assets, tmp_path_factory) -> dict[int, dict[str, float]]:
    """Metrics of a job of four steps, two epochs."""
    steps = whole(assets, tmp_path_factory.mktemp("uninterrupted") / "run").steps()
    assert sorted(steps) == [1, 2, 3, 4]
    assert all(steps[step]["actor/loss"] != 0 and steps[step]["actor/grad_norm"] > 1e-4 for step in steps)
    assert len({steps[step]["actor/lr"] for step in steps}) == 4
    return steps


def assert_same_steps(got: dict[int, dict[str, float]], want: dict[int, dict[str, float]], first: int) -> None:
    assert sorted(got) == list(range(first, STEPS + 1))
    for step, metrics in got.items():
        for name in SAME:
            assert metrics[name] == pytest.approx(want[step][name], rel=1e-5, abs=1e-9), (step, name)


def go_on(assets: Path, job: Job, want: dict[int, dict[str, float]]) -> str:
    """Start the job again; its output."""
    latest = find_latest(job.folder / "checkpoints").folder
    assert latest is not None
    again = whole(assets, job.folder)
    assert f"psrl: resumed from {latest}" in again.output()
    assert_same_steps(again.steps(), want, first=int(latest.name.removeprefix("global_step_")) + 1)
    return again.output()


def kill(job: Job, pid: int) -> set[int]:
    """The processes of the job, before one is killed."""
    processes = set(descendants(job.process.pid, list_processes()))
    os.kill(pid, signal.SIGKILL)
    return processes


def error_line(job: Job, seconds: float) -> str:
    """What a job that lost a process says, at its end within ``seconds``."""
    began = time.monotonic()
    assert finish(job) == 1
    assert time.monotonic() - began < seconds
    lines = [line for line in job.output().splitlines() if line.startswith("psrl: error: ")]
    assert len(lines) == 1
    return lines[0]


def assert_gone(processes: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := processes & list_processes().keys():
        assert time.monotonic() < deadline, {pid: command(pid) for pid in left}
        time.sleep(0.2)


def test_a_worker_killed_in_the_update(assets, uninterrupted, tmp_path):
    job = start(assets, tmp_path / "run")
    job.wait_for(lambda: len(job.steps()) == 2 and job.processes(UPDATE), "the update of step 3")
    worker = job.processes(UPDATE)[0]
    processes = kill(job, worker)
    line = error_line(job, seconds=60)
    assert re.search(rf"the training worker of rank [01] \(pid {worker} on [\d.]+\) died: killed, out of memory", line)
    assert f"The last whole checkpoint is {job.folder}/checkpoints/global_step_2: start the job again" in line
    assert_gone(processes, seconds=60)
    go_on(assets, job, uninterrupted)


def test_a_rollout_server_killed_in_the_rollout(assets, uninterrupted, tmp_path):
    job = start(assets, tmp_path / "run")
    job.wait_for(job.steps, "the rollout of step 2, which follows the metrics of step 1")
    server = job.processes("HFServer")[0]
    kill(job, server)
    line = error_line(job, seconds=60)
    assert re.search(rf"rollout server psrl_hf_server_[01] \(pid {server} on [\d.]+\) died: killed", line)
    assert not (job.folder / "checkpoints" / "global_step_2").exists()  # nothing was trained on what was left
    go_on(assets, job, uninterrupted)


def test_an_agent_loop_killed_in_the_rollout_does_not_hang_the_job(assets, tmp_path):
    job = start(assets, tmp_path / "run")
    job.wait_for(job.steps, "the rollout of step 2")
    agent = job.processes("AgentLoopWorker")[0]
    kill(job, agent)
    assert f"an agent loop worker (pid {agent} on " in error_line(job, seconds=60)


def test_a_worker_killed_while_a_checkpoint_is_written(assets, uninterrupted, tmp_path):
    job = start(assets, tmp_path / "run")
    folder = job.folder / "checkpoints" / "global_step_3"
    job.wait_for(lambda: (folder / "actor").exists() and job.processes(SAVE), "the third checkpoint")
    kill(job, job.processes(SAVE)[0])
    assert "the training worker of rank" in error_line(job, seconds=60)
    assert folder.exists()
    assert f"psrl: not resumed from: {folder}: not saved to its end" in go_on(assets, job, uninterrupted)
    assert find_latest(folder.parent).folder == folder.with_name("global_step_4")


def test_a_killed_driver_leaves_no_processes(assets, uninterrupted, tmp_path):
    job = start(assets, tmp_path / "run")
    folder = job.folder / "checkpoints" / "global_step_3"
    job.wait_for(lambda: (folder / "actor").exists() and job.processes(SAVE), "the third checkpoint")
    processes = kill(job, job.process.pid)
    assert job.process.wait(timeout=60) == -signal.SIGKILL
    assert_gone(processes, seconds=60)
    go_on(
        assets, job, uninterrupted
    )  # from that checkpoint, if the trainer lived long enough, else from the one before


def test_a_half_written_checkpoint_is_left_out(assets, uninterrupted, tmp_path):
    job = whole(assets, tmp_path / "run")
    assert_same_steps(job.steps(), uninterrupted, first=1)  # two jobs alike
    last = job.folder / "checkpoints" / "global_step_4"
    shard = next((last / "actor" / "optimizer" / "dist_ckpt").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    reason = f"{last}: actor/optimizer/dist_ckpt/{shard.name} has {shard.stat().st_size:,} bytes"
    named = start(assets, tmp_path / "run", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={last}")
    assert finish(named) == 2
    assert f"psrl: error: trainer.resume_from_path: {reason}" in named.output()
    assert f"psrl: not resumed from: {reason}" in go_on(assets, job, uninterrupted)


def test_a_worker_without_the_plugin_fails_at_once(tmp_path):
    code = """
import ray
import verl
from psrl.integrations.verl.trainer_workers import PSRLActorRolloutRefWorker as Worker
ray.init(num_cpus=4, include_dashboard=False)
unset = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": ""}}
worker = ray.remote(Worker).options(runtime_env=unset).remote(config=None, role="actor")
ray.get(worker.__ray_ready__.remote(), timeout=100)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "psrl.integrations.verl.plugin",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "VERL_USE_EXTERNAL_MODULES='' in process" in done.stderr
    assert "veRL would run here without psrl's plug-in" in done.stderr
    assert "GetTimeoutError" not in done.stderr
