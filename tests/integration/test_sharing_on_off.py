"""The same job on the same rollouts with and without prefix sharing: losses, KL, gradient norms and weights."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.jobs import make_assets, train

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

NUM_STEPS = 5
# A model that has learnt nothing earns nothing, and its gradients would be 0: a price for an answer that is no command
# tells its trajectories apart.
JOB = [
    "+agents.invalid_action_penalty=0.5",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    f"trainer.total_training_steps={NUM_STEPS}",
    f"trainer.save_freq={NUM_STEPS}",
    "psrl.poll_seconds=0.2",
]
# Of a metric: what float32 sums in another order may move it by, relative, and where it is about 0.
TOLERANCES = {
    "actor/loss": (1e-4, 1e-6),
    "actor/pg_loss": (1e-4, 1e-6),
    "actor/kl_loss": (1e-4, 1e-7),
    "actor/grad_norm": (1e-4, 0.0),
    "actor/entropy": (1e-5, 0.0),
}
# veRL takes the mean of these over ranks and micro-batches whatever they hold (AggregationType.MEAN in
# workers/utils/losses.py), so they depend on what rows each has.
BY_CELL = {"actor/ppo_kl": (1e-4, 1e-6), "actor/pg_clipfrac": (0.0, 1e-6)}
Run = tuple[list[dict[str, float]], Path]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return make_assets(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def recorded(assets, tmp_path_factory) -> Run:
    """Five steps with sharing, in the mini-batches that veRL makes, and their rollouts."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    steps = train(assets, folder, *JOB, "psrl.keep_minibatch=true", f"psrl.record_rollouts={folder}/rollouts")
    return steps, folder


def weights(folder: Path) -> dict[str, Tensor]:
    """Of the actor after the last step."""
    (file,) = (folder / "checkpoints" / f"global_step_{NUM_STEPS}" / "actor").rglob("model.safetensors")
    return load_file(file)


def assert_same(
    recorded: Run, replayed: Run, before: dict[str, Tensor], tolerances: dict[str, tuple[float, float]]
) -> None:
    assert len(recorded[0]) == NUM_STEPS
    for step, other in zip(recorded[0], replayed[0], strict=True):
        assert step["actor/grad_norm"] > 1e-3
        for name, (relative, absolute) in tolerances.items():
            assert other[name] == pytest.approx(step[name], rel=relative, abs=absolute), name
        assert other["psrl/trajectory_reward"] == step["psrl/trajectory_reward"]
    after, other_after = weights(recorded[1]), weights(replayed[1])
    assert after.keys() == other_after.keys() == before.keys()
    for name, weight in after.items():
        change = (weight - before[name]).norm()
        assert change > 0, name
        assert (other_after[name] - weight).norm() <= 1e-3 * change, name


def test_replayed_without_sharing_on_the_same_ranks(assets, recorded, tmp_path):
    """With room for every rank's part of a mini-batch in one micro-batch, so that all metrics are comparable."""
    folder = tmp_path / "run"
    off = ["psrl.enable=false", "psrl.keep_minibatch=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"]
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", *off)
    assert "psrl/ideal_speedup" in recorded[0][0] and "psrl/ideal_speedup" not in steps[0]
    assert_same(recorded, (steps, folder), load_file(assets / "model" / "model.safetensors"), {**TOLERANCES, **BY_CELL})


def test_replayed_without_sharing_and_with_verls_own_placement(assets, recorded, tmp_path):
    folder = tmp_path / "run"
    off = ["psrl.enable=false", "psrl.balance=false"]
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", *off)
    assert_same(recorded, (steps, folder), load_file(assets / "model" / "model.safetensors"), TOLERANCES)


def test_replayed_with_sharing(assets, recorded, tmp_path):
    folder = tmp_path / "run"
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", "psrl.keep_minibatch=true")
    assert_same(recorded, (steps, folder), load_file(assets / "model" / "model.safetensors"), {**TOLERANCES, **BY_CELL})
