"""``scripts/train_torchrun.py`` and ``scripts/launch_multinode.sh``: real processes on loopback."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from psrl.cli.offline import offline
from psrl.cli.root import command_line
from psrl.integrations.verl.trainer.durable_checkpoint import MANIFEST, TRACKER
from tests.helpers.jobs import REPOSITORY, free_port

SCRIPT = REPOSITORY / "scripts" / "train_torchrun.py"
MODEL = ["--model", "tiny-qwen2", "--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1"]
MAX_SECONDS = 900


def environment(**values: object) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo", **values}
    return {**kept, **{name: str(value) for name, value in own.items()}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    """Three step-wise sessions with advantages."""
    path = tmp_path_factory.mktemp("traces") / "samples.jsonl"
    rows = []
    for session in range(3):
        ids = [1 + (7 * i + 31 * session) % 200 for i in range(60)]
        for turn in range(4):
            length = 12 * (turn + 1) + session
            mask = [int(i >= length - 4) for i in range(length)]
            rows.append(
                {"input_ids": ids[:length], "loss_mask": mask, "session": session, "index": turn,
                 "advantage": 1.0 - 0.7 * session}
            )  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


OPTIONS = ["--batch", "6", "--mini-batch", "3", "--lr", "1e-3", "--max-tokens", "40", "--kl-coef", "0.05"]


def start(arguments: list[object], log: Path, **values: object) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(
            [str(argument) for argument in arguments],
            env=environment(**values),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def ended(*processes: subprocess.Popen) -> Iterator[None]:
    """Nothing of the processes' sessions outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(arguments: list[object], log: Path, **values: object) -> str:
    process = start(arguments, log, **values)
    with ended(process):
        code = process.wait(timeout=MAX_SECONDS)
    assert code == 0, log.read_text()[-4000:]
    return log.read_text()


def torchrun(num_processes: int) -> list[object]:
    """With a port that torchrun takes itself."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node", num_processes, SCRIPT]  # fmt: skip


def steps(path: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(records[0]["step"], records[-1]["step"] + 1))
    return [(record["metrics"]["loss"], record["metrics"]["grad_norm"]) for record in records]


@pytest.fixture(scope="module")
def alone(traces: Path, tmp_path_factory) -> Path:
    """This process, without sharing: 8 steps in two epochs, and the model."""
    folder = tmp_path_factory.mktemp("alone")
    arguments = [traces, *MODEL, *OPTIONS, "--epochs", 2, "--sharing", "off", "--metrics", folder / "metrics.jsonl",
                 "--out", folder / "model"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        command_line(offline)([str(argument) for argument in arguments])
    assert len(steps(folder / "metrics.jsonl")) == 8
    return folder


def test_two_ranks_train_the_same_model_and_resume(traces: Path, alone: Path, tmp_path: Path):
    checkpoints, metrics, out = tmp_path / "checkpoints", tmp_path / "metrics.jsonl", tmp_path / "model"
    common = [traces, *MODEL, *OPTIONS, "--epochs", 2, "--metrics", metrics, "--checkpoints", checkpoints]
    run([*torchrun(2), *common, "--steps", 3, "--save-every", 1], tmp_path / "log1")
    folders = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
    assert folders == ["global_step_2", "global_step_4"]
    # As a training leaves it that was killed while it saved: named by nothing, without a manifest.
    shutil.copytree(checkpoints / "global_step_4", checkpoints / "global_step_8")
    (checkpoints / "global_step_8" / MANIFEST).unlink()
    (checkpoints / TRACKER).write_text("8")
    log = run([*torchrun(2), *common, "--out", out], tmp_path / "log2")
    assert "2 processes, 2 data-parallel ranks" in log and "resumed after step 4" in log
    assert "not resumed from: " in log and "global_step_8: not saved to its end" in log
    expected = steps(alone / "metrics.jsonl")
    assert steps(metrics) == [(pytest.approx(loss, rel=1e-4, abs=1e-6), pytest.approx(norm, rel=1e-4)) for loss, norm
                              in expected]  # fmt: skip
    left, right = load_file(out / "model.safetensors"), load_file(alone / "model" / "model.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        assert left[name] == pytest.approx(right[name], rel=1e-3, abs=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["--tp", 2, "--pp", 2], ["--pp", 2]])
def test_four_ranks_in_other_layouts(traces: Path, alone: Path, tmp_path: Path, layout: list[object]):
    metrics = tmp_path / "metrics.jsonl"
    run([*torchrun(4), traces, *MODEL, *OPTIONS, *layout, "--epochs", 2, "--metrics", metrics], tmp_path / "log")
    assert steps(metrics) == [(pytest.approx(loss, rel=1e-4, abs=1e-6), pytest.approx(norm, rel=1e-4)) for loss, norm
                              in steps(alone / "metrics.jsonl")]  # fmt: skip


@pytest.mark.slow
def test_another_trainings_checkpoint_is_refused(traces: Path, tmp_path: Path):
    common = [sys.executable, SCRIPT, traces, *MODEL, *OPTIONS, "--steps", 1, "--checkpoints", tmp_path / "ck"]
    run(common, tmp_path / "log")
    for more, message in (
        (["--seed", 3], "was saved with seed = 42, but this training has 3"),
        (["--resume", "never"], "holds global_step_2: name another folder, or use --resume auto"),
    ):
        process = start([*common, *more], tmp_path / "log")
        with ended(process):
            assert process.wait(timeout=MAX_SECONDS) == 2
        (line,) = (line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("psrl: error"))
        assert message in line


def test_processes_that_do_not_divide_are_refused(traces: Path, tmp_path: Path):
    process = start([sys.executable, SCRIPT, traces, *MODEL, *OPTIONS, "--tp", 3], tmp_path / "log", WORLD_SIZE=2)
    with ended(process):
        assert process.wait(timeout=MAX_SECONDS) == 2
    assert "2 processes do not divide by --tp 3 x --pp 1 x --cp 1 = 3" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, 70), (signal.SIGSTOP, 70)])
def test_a_dead_rank_ends_the_others_with_its_name(traces: Path, tmp_path: Path, how: signal.Signals, code: int):
    arguments = [sys.executable, SCRIPT, traces, *MODEL, *OPTIONS, "--epochs", 1000, "--timeout", 20]
    values = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    first = start(arguments, tmp_path / "log0", RANK=0, **values)
    second = start(arguments, tmp_path / "log1", RANK=1, **values)
    with ended(first, second):
        wait_for("step 3/", tmp_path / "log0", first)
        second.send_signal(how)
        assert first.wait(timeout=MAX_SECONDS) == code
    output = (tmp_path / "log0").read_text()
    assert f"rank 1 (pid {second.pid} on {socket.gethostname()}) is gone: no sign of it for" in output


@pytest.mark.slow
def test_two_nodes_with_the_launcher(traces: Path, alone: Path, tmp_path: Path):
    launcher = REPOSITORY / "scripts" / "launch_multinode.sh"
    metrics = tmp_path / "metrics.jsonl"
    arguments = [launcher, "torchrun", traces, *MODEL, *OPTIONS, "--epochs", 2, "--metrics", metrics]
    values = {"NNODES": 2, "NPROC": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PSRL_VENV": sys.prefix}
    nodes = [start(arguments, tmp_path / f"log{rank}", NODE_RANK=rank, **values) for rank in (0, 1)]
    with ended(*nodes):
        for rank, node in enumerate(nodes):
            assert node.wait(timeout=MAX_SECONDS) == 0, (tmp_path / f"log{rank}").read_text()[-4000:]
    assert steps(metrics) == [(pytest.approx(loss, rel=1e-4, abs=1e-6), pytest.approx(norm, rel=1e-4)) for loss, norm
                              in steps(alone / "metrics.jsonl")]  # fmt: skip


def wait_for(text: str, log: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
