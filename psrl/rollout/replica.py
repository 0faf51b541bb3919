"""The replica: one named Ray actor, on the node of the workers that it belongs to."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutReplica

from psrl.errors import UnsupportedError
from psrl.rollout.server import HFServer
from psrl.rollout.settings import read_settings


def server_name(replica_rank: int) -> str:
    """Name of a replica's actor, in the job's namespace."""
    return f"psrl_hf_server_{replica_rank}"


class HFReplica(RolloutReplica):
    """veRL's handle of one server. No HTTP: its address is the actor's name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        read_settings(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedError(
                "the hf rollout serves the policy only: use vllm or sglang for reward or teacher models"
            )

    async def launch_servers(self) -> None:
        """Start the actor and wait until its model is loaded."""
        name = server_name(self.replica_rank) + self.name_suffix
        options: dict[str, Any] = {"name": name, "num_cpus": 0, "max_concurrency": self.max_concurrency}
        if self.workers:
            node_id = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        actor_class: Any = ray.remote(HFServer)
        server: Any = actor_class.options(**options).remote(
            model_path=self.model_config.path, rollout=self.config, seed=self.config.seed
        )
        await server.stats.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, name
