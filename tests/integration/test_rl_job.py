"""The whole job: two Megatron workers under Ray, the hf rollout and text games, on a CPU."""

from pathlib import Path

import pytest

from psrl.models.tiny_chat import make_tiny_chat
from tests.helpers import jobs

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_tiny_chat(folder / "model", hidden=32)
    data = ["psrl.agents.dataset", "textworld", "--out", str(folder / "data"), "--train", "4", "--val", "1"]
    jobs.launch(data, folder)
    return folder


def train(assets: Path, folder: Path, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """Metrics of every step of two, and what the job printed."""
    steps = jobs.train(assets, folder, "trainer.total_training_steps=2", *overrides)
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
