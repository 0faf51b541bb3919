"""The same job on the same rollouts with and without prefix sharing: losses, KL, gradient norms and weights."""

from pathlib import Path

import pytest

from tests.helpers.jobs import make_assets, train
from tests.helpers.same_rollouts import TOLERANCES, assert_same_metrics, assert_same_weights, job_of

pytest.importorskip("textworld")
pytestmark = pytest.mark.slow

NUM_STEPS = 5
JOB = job_of(NUM_STEPS)
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


def assert_same(
    assets: Path, recorded: Run, replayed: Run, tolerances: dict[str, tuple[float, float]] = TOLERANCES
) -> None:
    assert len(recorded[0]) == NUM_STEPS
    assert_same_metrics(recorded[0], replayed[0], tolerances)
    for step, other in zip(recorded[0], replayed[0], strict=True):
        assert other["psrl/trajectory_reward"] == step["psrl/trajectory_reward"]
    assert_same_weights(assets, recorded[1], replayed[1])


def test_replayed_without_sharing_on_the_same_ranks(assets, recorded, tmp_path):
    """With room for every rank's part of a mini-batch in one micro-batch, so that all metrics are comparable."""
    folder = tmp_path / "run"
    off = ["psrl.enable=false", "psrl.keep_minibatch=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"]
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", *off)
    assert "psrl/ideal_speedup" in recorded[0][0] and "psrl/ideal_speedup" not in steps[0]
    assert_same(assets, recorded, (steps, folder), {**TOLERANCES, **BY_CELL})


def test_replayed_without_sharing_and_with_verls_own_placement(assets, recorded, tmp_path):
    folder = tmp_path / "run"
    off = ["psrl.enable=false", "psrl.balance=false"]
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", *off)
    assert_same(assets, recorded, (steps, folder))


def test_replayed_with_sharing(assets, recorded, tmp_path):
    folder = tmp_path / "run"
    steps = train(assets, folder, *JOB, f"psrl.replay_rollouts={recorded[1]}/rollouts", "psrl.keep_minibatch=true")
    assert_same(assets, recorded, (steps, folder), {**TOLERANCES, **BY_CELL})
