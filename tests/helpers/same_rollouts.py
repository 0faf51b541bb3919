"""Jobs on the same rollouts, with and without prefix sharing: their settings, and how alike they have to be."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

# Of a metric: what float32 sums in another order may move it by, relative, and where it is about 0.
TOLERANCES = {
    "actor/loss": (1e-4, 1e-6),
    "actor/pg_loss": (1e-4, 1e-6),
    "actor/kl_loss": (1e-4, 1e-7),
    "actor/grad_norm": (1e-4, 0.0),
    "actor/entropy": (1e-5, 0.0),
}


def job_of(num_steps: int) -> list[str]:
    """Settings of a job that ends with a checkpoint.

    A model that has learnt nothing earns nothing, and its gradients would be 0: a price for an answer that is no
    command tells its trajectories apart.
    """
    return [
        "+agents.invalid_action_penalty=0.5",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.save_freq={num_steps}",
        "psrl.poll_seconds=0.2",
    ]


def assert_same_metrics(
    steps: Sequence[dict[str, float]],
    others: Sequence[dict[str, float]],
    tolerances: Mapping[str, tuple[float, float]] = TOLERANCES,
) -> None:
    for step, other in zip(steps, others, strict=True):
        assert step["actor/grad_norm"] > 1e-3
        for name, (relative, absolute) in tolerances.items():
            assert other[name] == pytest.approx(step[name], rel=relative, abs=absolute), name


def assert_same_weights(assets: Path, job: Path, other: Path, bounds: Mapping[str, float] | None = None) -> None:
    """The actor's of two jobs, after their last step.

    Args:
        assets: has the ``model`` that both began with.
        bounds: of a weight's difference, relative to its change; 1e-3 where it is not named.
    """
    before = load_file(assets / "model" / "model.safetensors")
    after, other_after = _weights(job), _weights(other)
    assert after.keys() == other_after.keys() == before.keys()
    for name, weight in after.items():
        change = (weight - before[name]).norm()
        assert change > 0, name
        assert (other_after[name] - weight).norm() <= (bounds or {}).get(name, 1e-3) * change, name


def _weights(folder: Path) -> dict[str, Tensor]:
    (file,) = (folder / "checkpoints").glob("global_step_*/actor/**/model.safetensors")
    return load_file(file)
