"""kill -9 of a worker, a rollout server and the driver in the middle of a step, and the same losses afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from psrl.integrations.verl.trainer.durable_checkpoint import find_latest
from tests.helpers.jobs import REPOSITORY, Job, assert_gone, make_assets, start_training

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

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


def start(assets: Path, folder: Path, *overrides: str) -> Job:
    return start_training(assets, folder, f"trainer.total_training_steps={STEPS}", *SETTINGS, *overrides)


def whole(assets: Path, folder: Path, *overrides: str) -> Job:
    job = start(assets, folder, *overrides)
    assert job.finish() == 0, job.output()[-8000:]
    return job


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("job"))


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


def go_on(assets: Path, job: Job, want: dict[int, dict[str, float]], *overrides: str) -> str:
    """Start the job again; its output."""
    latest = find_latest(job.folder / "checkpoints").folder
    assert latest is not None
    again = whole(assets, job.folder, *overrides)
    assert f"psrl: resumed from {latest}" in again.output()
    assert_same_steps(again.steps(), want, first=int(latest.name.removeprefix("global_step_")) + 1)
    return again.output()


def kill(job: Job, pid: int) -> set[int]:
    """The processes of the job, before one is killed."""
    processes = set(job.processes())
    os.kill(pid, signal.SIGKILL)
    return processes


def error_line(job: Job, seconds: float) -> str:
    """What a job that lost a process says, at its end within ``seconds``."""
    began = time.monotonic()
    assert job.finish() == 1
    assert time.monotonic() - began < seconds
    lines = [line for line in job.output().splitlines() if line.startswith("psrl: error: ")]
    assert len(lines) == 1
    return lines[0]


def kill_in_the_update(assets: Path, folder: Path, *overrides: str) -> Job:
    """A job that has lost a worker in the update of step 3, said so, and left nothing behind."""
    job = start(assets, folder, *overrides)
    job.wait_for(lambda: len(job.steps()) == 2 and job.processes(UPDATE), "the update of step 3")
    worker = job.processes(UPDATE)[0]
    processes = kill(job, worker)
    line = error_line(job, seconds=60)
    assert re.search(rf"the training worker of rank [01] \(pid {worker} on [\d.]+\) died: killed, out of memory", line)
    assert f"The last whole checkpoint is {job.folder}/checkpoints/global_step_2: start the job again" in line
    assert_gone(processes, seconds=60)
    return job


def test_a_worker_killed_in_the_update(assets, uninterrupted, tmp_path):
    job = kill_in_the_update(assets, tmp_path / "run")
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
    assert named.finish() == 2
    assert f"psrl: error: trainer.resume_from_path: {reason}" in named.output()
    assert f"psrl: not resumed from: {reason}" in go_on(assets, job, uninterrupted)


APART = ("trainer.v1.trainer_mode=psrl_separate_async", "trainer.v1.separate_async.num_warmup_batches=0")
"""Every rollout waits for the weights of the step before: two jobs are alike in this mode too."""


def test_a_worker_killed_in_the_update_of_separate_async(assets, tmp_path):
    want = whole(assets, tmp_path / "uninterrupted", *APART).steps()
    assert sorted(want) == [1, 2, 3, 4]
    job = kill_in_the_update(assets, tmp_path / "run", *APART)
    go_on(assets, job, want, *APART)


@pytest.mark.parametrize("mode", ["psrl_separate_async", "psrl_colocate_async"])
def test_rollouts_that_run_ahead_go_on_from_the_checkpoint(assets, uninterrupted, tmp_path, mode):
    """Which weights they are drawn from is a matter of time: step, schedule and prompts are those of the checkpoint."""
    overrides = (f"trainer.v1.trainer_mode={mode}",)
    job = start(assets, tmp_path / "run", *overrides)
    job.wait_for(lambda: len(job.steps()) == 2 and job.processes(UPDATE), "the update of step 3")
    kill(job, job.processes(UPDATE)[0])
    assert f"The last whole checkpoint is {job.folder}/checkpoints/global_step_2" in error_line(job, seconds=60)
    again = whole(assets, job.folder, *overrides, f"trainer.rollout_data_dir={job.folder}/dump")
    assert f"psrl: resumed from {job.folder}/checkpoints/global_step_2" in again.output()
    steps = again.steps()
    assert sorted(steps) == [3, 4]
    for step, metrics in steps.items():
        assert metrics["actor/lr"] == uninterrupted[step]["actor/lr"]
    # Two prompts were under way when the checkpoint was written, fetched in step 2.
    dumped = [json.loads(line) for step in steps for line in (job.folder / "dump" / f"{step}.jsonl").open()]
    assert {"00000002-000000", "00000002-000001"} <= {row["uid"].split("_")[0] for row in dumped}


def test_a_worker_without_the_plugin_fails_at_once(tmp_path):
    code = """
import ray
import verl
from psrl.integrations.verl.trainer.workers import PSRLActorRolloutRefWorker as Worker
ray.init(num_cpus=4, include_dashboard=False)
unset = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": ""}}
worker = ray.remote(Worker).options(runtime_env=unset).remote(config=None, role="actor")
ray.get(worker.__ray_ready__.remote(), timeout=600)
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
        timeout=900,
    )
    assert done.returncode == 1
    assert "VERL_USE_EXTERNAL_MODULES='' in process" in done.stderr
    assert "veRL would run here without psrl's plug-in" in done.stderr
    assert "GetTimeoutError" not in done.stderr
