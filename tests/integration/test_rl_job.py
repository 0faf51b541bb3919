"""The whole job: two Megatron workers under Ray, the hf rollout and text games, on a CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import jobs

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return jobs.make_assets(tmp_path_factory.mktemp("job"))


def train(assets: Path, folder: Path, *overrides: str, **launch: Any) -> tuple[list[dict[str, float]], str]:
    """Metrics of every step of two, and what the job printed."""
    steps = jobs.train(assets, folder, "trainer.total_training_steps=2", *overrides, **launch)
    return steps, (folder / "job.log").read_text()


def test_two_steps(assets, tmp_path):
    steps, output = train(assets, tmp_path / "run")
    assert len(steps) == 2
    assert (
        "psrl: sharing prefixes in update, old log-prob, reference; Megatron on cpu (float32), 2 data-parallel"
        in output
    )
    for step in steps:
        rows = step["psrl/placement/rows"]
        for phase in ("old_log_prob", "ref", "update"):
            assert step[f"psrl/{phase}/samples"] == rows  # every row once
            assert step[f"psrl/{phase}/tokens"] == step["psrl/tokens"]
            assert step[f"psrl/{phase}/unique_tokens"] < step["psrl/tokens"]
            assert step[f"psrl/{phase}/load_imbalance"] >= 1.0
        assert 1.0 <= step["psrl/load_imbalance/after"] <= 1.1
        # The critical path, imbalance times work, is no longer than in veRL's order.
        critical_path = step["psrl/load_imbalance/after"] * step["psrl/placement/workload_ratio"]
        assert critical_path < step["psrl/load_imbalance/before"]
        assert step["psrl/prefix_match_rate"] > 0.3
        assert step["psrl/ideal_speedup"] > 1.3
        assert step["psrl/first_log_ratio"] <= 1e-5
        assert step["psrl/spine_tokens"] >= 0
        assert step["psrl/kv_bytes_peak"] >= 0
        assert 0 < step["psrl/planning_seconds"] < step["timing_s/step"]
        assert step["training/rollout_probs_diff_max"] < 1e-4


def test_step_advantages_on_kept_mini_batches_with_a_small_budget(assets, tmp_path):
    steps, output = train(
        assets,
        tmp_path / "run",
        "psrl.advantage=step",
        "psrl.keep_minibatch=true",
        "psrl.max_tokens=600",
        "psrl.infer_max_tokens=300",
        "trainer.total_training_steps=1",
    )
    assert "micro-batches of 600 tokens (forward only 300)" in output
    assert "psrl/advantage/level_std" in steps[0]
    assert steps[0]["psrl/old_log_prob/spine_tokens"] > 0
    assert steps[0]["psrl/kv_bytes_peak"] > 0
    assert steps[0]["psrl/first_log_ratio"] <= 1e-5


def test_colocated_rollouts(assets, tmp_path):
    """Rollouts and training take turns on the same slots."""
    steps, output = train(assets, tmp_path / "run", "trainer.v1.trainer_mode=psrl_colocate_async")
    assert "psrl: sharing prefixes in update, old log-prob, reference; Megatron on cpu (float32)" in output
    assert len(steps) == 2
    for step in steps:
        assert step["psrl/update/samples"] == step["psrl/placement/rows"]
        assert step["psrl/prefix_match_rate"] > 0.3
        assert step["psrl/first_log_ratio"] <= 1e-5


SEPARATE = ("trainer.v1.trainer_mode=psrl_separate_async", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.entropy_coeff=0.01")  # fmt: skip
STALE = 1e-7
"""Between probabilities of about 1/500: other weights differ by more, rounding by less."""


def test_separate_rollouts_have_the_weights_of_the_trainer(assets, tmp_path):
    steps, output = train(
        assets,
        tmp_path / "run",
        *SEPARATE,
        "trainer.total_training_steps=3",
        # No rollout before its step: every sample comes from the weights of the last synchronisation, which the old
        # log-probs of both updates are computed with.
        "trainer.v1.separate_async.num_warmup_batches=0",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    assert "psrl: sharing prefixes in update, old log-prob, reference; Megatron on cpu (float32)" in output
    assert "rollout hf, weights by psrl_gloo" in output
    assert len(steps) == 3
    for step in steps:
        assert step["training/off_policy/trajectory_staleness/max"] == 0
        assert step["training/rollout_probs_diff_max"] < STALE
        assert step["psrl/first_log_ratio"] > 1e-3  # of two updates on average: the second has other weights
        assert step["psrl/weights/buckets"] == 1
        assert step["psrl/weights/bytes"] > 0
        assert step["psrl/prefix_match_rate"] > 0.3


def test_separate_rollouts_run_ahead(assets, tmp_path):
    first, second = train(assets, tmp_path / "run", *SEPARATE)[0]
    assert first["training/rollout_probs_diff_max"] < STALE
    assert first["psrl/first_log_ratio"] <= 1e-5
    assert second["training/off_policy/trajectory_staleness/max"] == 1  # generated with the weights before the update
    assert second["training/rollout_probs_diff_max"] > STALE
    assert second["psrl/prefix_match_rate"] > 0.3


def test_the_command_of_verl(assets, tmp_path):
    """``python -m verl.trainer.main_ppo`` with psrl's configuration, as docs/quickstart.md gives it."""
    steps, output = train(
        assets,
        tmp_path / "run",
        command=jobs.MAIN_PPO,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="psrl.integrations.verl.plugin",
    )
    assert "psrl: sharing prefixes in update, old log-prob, reference; Megatron on cpu (float32), 2 data-par" in output
    assert len(steps) == 2
    for step in steps:
        for phase in ("old_log_prob", "ref", "update"):
            assert step[f"psrl/{phase}/samples"] == step["psrl/placement/rows"]
            assert step[f"psrl/{phase}/unique_tokens"] < step["psrl/tokens"]
        assert step["psrl/first_log_ratio"] <= 1e-5
