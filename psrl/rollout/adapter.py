"""The trainer's side of a replica: in every worker's process, sends its weights to the replica's server."""

from __future__ import annotations

import os
from typing import Any

import ray
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from psrl.errors import UnsupportedError
from psrl.rollout.replica import server_name
from psrl.rollout.settings import read_settings


class HFServerAdapter(BaseRollout):
    """A replica belongs to one worker, since it is one process (``settings``)."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        read_settings(self.config)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the server's memory comes back on demand."""

    async def release(self) -> None:
        """Give the memory of K/V back."""
        await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all weights, in buckets. Exhausts ``weights`` whatever happens: producing them is collective.

        Args:
            weights: (name, tensor) by transformers' names; an iterator, or an asynchronous one.
            global_steps: version that responses carry from now on.

        Raises:
            UnsupportedError: adapters, or another wire format.
            RolloutError: names that are missing or unknown to the server's model.
        """
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        tensors = ensure_async_iterator(weights)
        try:
            if wire_format != "named_tensors":
                raise UnsupportedError(f"wire_format={wire_format!r} is not supported by the hf rollout: named_tensors")
            if peft_config is not None:
                raise UnsupportedError("LoRA adapters are not supported by the hf rollout: set model.lora.merge=True")
            server = self._server()
            await server.begin_update.remote()
            bucket: list[tuple[str, Tensor]] = []
            num_bytes = 0
            async for name, tensor in tensors:
                if bucket and num_bytes + tensor.nbytes > bucket_bytes:
                    await server.load_weights.remote(bucket)
                    bucket, num_bytes = [], 0
                bucket.append((name, tensor.detach().cpu().clone()))
                num_bytes += tensor.nbytes
            await server.load_weights.remote(bucket)
            await server.finish_update.remote(global_steps)
        finally:
            async for _name, _tensor in tensors:
                pass

    def _server(self) -> Any:
        return ray.get_actor(server_name(self.replica_rank))
