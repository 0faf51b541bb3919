"""The embedded CPU rollout: ``actor_rollout_ref.rollout.name=hf``.

``register`` makes it known to veRL. What generates is ``generator``, which knows neither veRL nor Ray.
"""

from __future__ import annotations

NAME = "hf"


def register() -> None:
    """Register the server adapter and the replica with veRL. Idempotent; the plug-in calls it in every process."""
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[(NAME, "async")] = "psrl.rollout.adapter.HFServerAdapter"
    replica.RolloutReplicaRegistry.register(NAME, _load_replica)


def _load_replica() -> type:
    from psrl.rollout.replica import HFReplica

    return HFReplica
