"""veRL's own command: what makes a job impossible ends it before workers start, and the key is named."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def main_ppo(
    folder: Path, *overrides: str, config: str = "psrl_trainer", **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    command = ["-m", "verl.trainer.main_ppo", "--config-dir", "configs", "--config-name", config]
    return subprocess.run(
        [sys.executable, *command, f"hydra.run.dir={folder}", *overrides],
        cwd=REPOSITORY,
        env={
            **kept,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "VERL_USE_EXTERNAL_MODULES": "psrl.integrations.verl.plugin",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+psrl.share=true"], "unknown key psrl.share; known keys: enable, "),
        (["psrl.max_tokens=0"], "psrl.max_tokens must be at least 1, got 0"),
        (
            [f"{A}.megatron.override_transformer_config.hidden_dropout=0.1"],
            f"{A}.megatron.override_transformer_config.hidden_dropout is 0.1, but a shared token has one hidden state",
        ),
        (["trainer.device=cpu", f"{A}.megatron.vanilla_mbridge=true"], f"{R}.name=vllm needs GPUs, but trainer.device"),
        (["trainer.device=cpu"], f"{A}.megatron.vanilla_mbridge must be true where trainer.device is cpu"),
        ([f"{A}.strategy=fsdp2"], f"{A}.strategy must be megatron, got 'fsdp2'"),
        (["trainer.v1.trainer_mode=sync"], "trainer.v1.trainer_mode must be one of psrl_sync, "),
        (
            [f"{A}.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=8"],
            f"{A}.ppo_mini_batch_size: 4 prompts times rollout.n=1 are fewer rows than the 8 data-parallel ranks",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_ray_starts(tmp_path, overrides, message):
    done = main_ppo(tmp_path, *overrides)
    assert done.returncode == 2, done.stderr[-4000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("psrl: error:")]
    assert message in line
    assert "ray init kwargs" not in done.stdout


def test_a_key_that_does_not_exist_is_named(tmp_path):
    done = main_ppo(tmp_path, "psrl.shares=true")
    assert done.returncode == 1
    assert "Could not override 'psrl.shares'" in done.stderr
    assert "ray init kwargs" not in done.stdout


def test_the_trainer_checks_again_before_it_starts_workers(tmp_path):
    """With Hydra's callback taken away."""
    with tempfile.TemporaryDirectory(prefix="ray") as ray_folder:  # short: of sockets' paths
        done = main_ppo(
            tmp_path,
            "~hydra.callbacks.psrl",
            "+psrl.share=true",
            config="cpu_quickstart",
            VERL_PLATFORM="cpu",
            RAY_TMPDIR=ray_folder,
        )
        logs = "".join(log.read_text(errors="replace") for log in Path(ray_folder).glob("ray/session_2*/logs/worker-*"))
    assert done.returncode == 1
    assert "psrl.errors.ConfigError: unknown key psrl.share" in done.stderr
    assert "ray init kwargs" in done.stdout
    assert ":actor_name:TaskRunnerV1" in logs
    assert "WorkerDict" not in logs
