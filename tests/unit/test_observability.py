"""Records of the ranks' engines as metrics."""

import pytest

from psrl.integrations.verl.engine.observability import (
    PassRecord,
    headline_metrics,
    phase_metrics,
    step_line,
    trajectory_reward,
)


def record(tokens: int, unique: int, **values: float) -> PassRecord:
    fields = {
        "num_samples": 2, "spine_tokens": 1, "kv_bytes_peak": 10, "flops_unshared": 4.0 * tokens,
        "flops_shared": 4.0 * unique, "planning_seconds": 0.1, "planning_wait_seconds": 0.02, "seconds": 1.0,
        "cpu_seconds": 0.5, "max_log_ratio": None,
    }  # fmt: skip
    return PassRecord(num_tokens=tokens, unique_tokens=unique, **{**fields, **values})


def test_a_phase_over_ranks_and_mini_batches():
    ranks = [
        [record(100, 40, max_log_ratio=1e-7), record(100, 20, max_log_ratio=0.5)],
        [record(100, 10, max_log_ratio=3e-7, kv_bytes_peak=30), record(100, 10, max_log_ratio=0.7)],
    ]
    metrics = phase_metrics("update", ranks)
    assert metrics == {
        "psrl/update/samples": 8.0,
        "psrl/update/tokens": 400.0,
        "psrl/update/unique_tokens": 80.0,
        "psrl/update/spine_tokens": 4.0,
        "psrl/update/prefix_match_rate": pytest.approx(0.8),
        "psrl/update/kv_bytes_peak": 30.0,
        "psrl/update/planning_seconds": pytest.approx(0.2),
        "psrl/update/planning_wait_seconds": pytest.approx(0.04),
        "psrl/update/seconds": 2.0,
        "psrl/update/cpu_seconds": 1.0,
        "psrl/update/ideal_speedup": pytest.approx(5.0),
        "psrl/update/load_imbalance": pytest.approx(1.5),
        "psrl/update/first_log_ratio": 3e-7,
    }
    assert headline_metrics({**metrics, **phase_metrics("ref", [[record(10, 10, kv_bytes_peak=99)]])}) == {
        "psrl/prefix_match_rate": pytest.approx(0.8),
        "psrl/tokens": 400.0,
        "psrl/unique_tokens": 80.0,
        "psrl/spine_tokens": 4.0,
        "psrl/ideal_speedup": pytest.approx(5.0),
        "psrl/first_log_ratio": 3e-7,
        "psrl/kv_bytes_peak": 99.0,
        "psrl/planning_seconds": pytest.approx(0.3),
        "psrl/planning_wait_seconds": pytest.approx(0.06),
    }


def test_kept_attention_where_there_is_some():
    metrics = phase_metrics("update", [[record(10, 5), record(10, 5, attention_bytes=70)], [record(10, 5)]])
    assert metrics["psrl/update/attention_bytes"] == 70.0
    assert "psrl/update/attention_bytes" not in phase_metrics("update", [[record(10, 5)]])


def test_the_host_tier_where_it_is_in_use():
    moved = {"kv_host_bytes_peak": 50, "kv_bytes_to_host": 60, "kv_bytes_to_device": 80}
    metrics = phase_metrics("update", [[record(10, 5), record(10, 5, **moved)], [record(10, 5, **moved)]])
    assert metrics["psrl/update/kv_host_bytes_peak"] == 50.0
    assert (metrics["psrl/update/kv_bytes_to_host"], metrics["psrl/update/kv_bytes_to_device"]) == (120.0, 160.0)


def test_tokens_computed_again_where_there_are_any():
    metrics = phase_metrics("update", [[record(10, 5), record(10, 7, recomputed_tokens=2)]])
    assert metrics["psrl/update/recomputed_tokens"] == 2.0
    assert "psrl/update/recomputed_tokens" not in phase_metrics("update", [[record(10, 5)]])


def test_ranks_without_outputs_and_phases_that_did_not_run():
    assert phase_metrics("ref", [[], []]) == {}
    assert phase_metrics("ref", [[], [record(10, 5)]])["psrl/ref/load_imbalance"] == 1.0


def test_without_sharing_there_is_no_speedup():
    metrics = phase_metrics("update", [[record(10, 10, flops_shared=0.0, flops_unshared=0.0)]])
    assert "psrl/update/ideal_speedup" not in metrics
    assert metrics["psrl/update/prefix_match_rate"] == 0.0


def test_a_trajectory_counts_once():
    trajectories = [("a", "0"), ("a", "0"), ("a", "0"), ("a", "1")]
    assert trajectory_reward(trajectories, [0.0, 0.0, 0.0, 1.0]) == 0.5


def test_line_of_a_step():
    metrics = {"psrl/trajectory_reward": 0.25, "timing_s/gen": 2.0, "timing_s/update_actor": 0.55, "timing_s/step": 3.0}
    assert step_line(metrics, 3, 10) == "step 3/10: reward 0.250; seconds: rollout 2.0, update 0.6, whole step 3.0"
    metrics |= {"psrl/tokens": 22485.0, "psrl/prefix_match_rate": 0.71, "psrl/ideal_speedup": 3.64}
    assert step_line(metrics, 3, 10) == (
        "step 3/10: reward 0.250; update of 22,485 tokens, 71% shared, ideal speed-up 3.6x; "
        "seconds: rollout 2.0, update 0.6, whole step 3.0"
    )
