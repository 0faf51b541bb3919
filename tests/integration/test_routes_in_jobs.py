"""Router replay in whole jobs: two workers that share the experts, on the same rollouts with and without sharing."""

from pathlib import Path

import pytest

from tests.helpers.jobs import make_assets, train
from tests.helpers.same_rollouts import assert_same_metrics, assert_same_weights, job_of

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

MEGATRON = "actor_rollout_ref.actor.megatron"
JOB = [*job_of(2), f"{MEGATRON}.expert_model_parallel_size=2"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("job"), experts=4)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_routes_are_replayed(assets, tmp_path, mode):
    """Of the old log-probs (R2), or of the rollout (R3). Without sharing veRL's own engine replays them."""
    returned = f"actor_rollout_ref.rollout.enable_rollout_routing_replay={'true' if mode == 'R3' else 'false'}"
    job = [*JOB, f"{MEGATRON}.router_replay.mode={mode}", returned]
    recorded = tmp_path / "recorded"
    steps = train(assets, recorded, *job, "psrl.keep_minibatch=true", f"psrl.record_rollouts={recorded}/rollouts")
    assert len(steps) == 2
    for step in steps:
        assert step["psrl/first_log_ratio"] <= 1e-5
        assert step["psrl/update/prefix_match_rate"] > 0.3
        assert step["training/rollout_probs_diff_max"] < 1e-4
    off = ["psrl.enable=false", "psrl.balance=false", f"psrl.replay_rollouts={recorded}/rollouts"]
    others = train(assets, tmp_path / "off", *job, *off)
    assert_same_metrics(steps, others)
    # The gradients of tokens that hardly occur are almost 0: Adam makes whole steps of them, and of their rounding.
    assert_same_weights(assets, recorded, tmp_path / "off", {"model.embed_tokens.weight": 1e-2})
