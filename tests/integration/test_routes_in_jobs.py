"""Router replay in whole jobs: two workers that share the experts, on the same rollouts with and without sharing."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.jobs import make_assets, train

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

MEGATRON = "actor_rollout_ref.actor.megatron"
JOB = [
    f"{MEGATRON}.expert_model_parallel_size=2",
    "+agents.invalid_action_penalty=0.5",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "psrl.poll_seconds=0.2",
]
TOLERANCES = {
    "actor/loss": (1e-4, 1e-6),
    "actor/pg_loss": (1e-4, 1e-6),
    "actor/kl_loss": (1e-4, 1e-7),
    "actor/grad_norm": (1e-4, 0.0),
    "actor/entropy": (1e-5, 0.0),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("job"), experts=4)


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the actor after the last step."""
    (file,) = (folder / "checkpoints" / "global_step_2" / "actor").rglob("model.safetensors")
    return load_file(file)


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
        assert step["actor/grad_norm"] > 1e-3
        assert step["training/rollout_probs_diff_max"] < 1e-4
    off = ["psrl.enable=false", "psrl.balance=false", f"psrl.replay_rollouts={recorded}/rollouts"]
    others = train(assets, tmp_path / "off", *job, *off)
    for step, other in zip(steps, others, strict=True):
        for name, (relative, absolute) in TOLERANCES.items():
            assert other[name] == pytest.approx(step[name], rel=relative, abs=absolute), name
    before = load_file(assets / "model" / "model.safetensors")
    after, other_after = weights(recorded), weights(tmp_path / "off")
    assert after.keys() == other_after.keys() == before.keys()
    for name, weight in after.items():
        change = (weight - before[name]).norm()
        assert change > 0, name
        # The gradients of tokens that hardly occur are almost 0: Adam makes whole steps of them, and of their rounding.
        bound = 1e-2 if name == "model.embed_tokens.weight" else 1e-3
        assert (other_after[name] - weight).norm() <= bound * change, name
