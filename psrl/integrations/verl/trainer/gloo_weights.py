"""Weights from the trainer to rollouts in slots of their own, over gloo: ``checkpoint_engine.backend=psrl_gloo``.

Hooks: ``verl/checkpoint_engine/base.py`` (``CheckpointEngineRegistry``); registered under a name of its own. veRL's
engines that leave the process need CUDA, an NPU or RDMA. Can go when veRL has one for host memory.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import ProcessGroupGloo
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)
from verl.workers.rollout.utils import ensure_async_iterator

from psrl.errors import RolloutError
from psrl.integrations.verl.job.rollout_checks import GLOO_WEIGHTS

TIMEOUT = timedelta(minutes=30)
"""For all to meet, and for a bucket to pass; a process that dies ends the job before that (``supervision``)."""
_ALIGNMENT = 16
"""Bytes, of every tensor in a bucket: a tensor is a view of it, whatever its dtype."""
_SENDER = 0


@CheckpointEngineRegistry.register(GLOO_WEIGHTS)  # pyright: ignore[reportAttributeAccessIssue]  a static method
class GlooWeights(CheckpointEngine):
    """Rank 0 of the trainer broadcasts buckets to every replica; tensors keep their dtypes and bits.

    A bucket is two sizes (bytes of its description, of its tensors; 0 and 0 end the update), the description and the
    tensors. The process group is made anew for every update, so replicas may come and go between two.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """
        Args:
            bucket_size: most bytes of a bucket; larger tensors come in parts.
            is_master: this is rank 0 of the trainer.
        """
        self._bucket_size, self._is_master = bucket_size, is_master
        self._store: Any = None
        self._group: Any = None

    # -------------------------------------------------------------------------------------------------------- group
    def prepare(self) -> dict[str, Any]:
        """``address``: where the group meets, in the master's process; elsewhere nothing."""
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"address": (host, self._store.port)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of ``init_process_group`` for every worker of the trainer, and of the replicas.

        The trainer's other ranks take no part: they hold the same tensors.

        Args:
            metadata: what ``prepare`` returned, the trainer's workers first.
        """
        world_size = 1 + rollout_world_size

        def arguments(ranks: list[int | None]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "address": [metadata[_SENDER]["address"]] * len(ranks),
            }

        return arguments([_SENDER] + [None] * (actor_wg_world_size - 1)), arguments(list(range(1, world_size)))

    def init_process_group(  # pyright: ignore[reportIncompatibleMethodOverride]  called with build_topology's keys
        self, rank: int | None, world_size: int, address: tuple[str, int]
    ) -> None:
        """Meet the others; returns when all are there.

        Args:
            rank: None for a worker of the trainer that takes no part.
        """
        if rank is None:
            return
        if not self._is_master:
            self._store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        # Beside the process's default group, which is the trainer's or a replica's own.
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    # ------------------------------------------------------------------------------------------------------ weights
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Broadcast all of ``weights``, and exhaust it whatever happens: producing them is collective.

        Args:
            weights: (name, tensor), or an asynchronous iterator of them.
            global_steps: the replicas' adapters know it already.

        Returns:
            Metrics of this update on the sender, none elsewhere.
        """
        tensors = ensure_async_iterator(weights)
        try:
            return await self._send(tensors) if self._group is not None else {}
        finally:
            async for _name, _tensor in tensors:
                pass

    @torch.no_grad()
    async def _send(self, tensors: AsyncIterator[tuple[str, Tensor]]) -> dict[str, float]:
        start = time.perf_counter()
        num_bytes = num_buckets = length = 0
        bucket = torch.empty(self._bucket_size, dtype=torch.uint8)
        metas: list[TensorMeta] = []
        on_host: Any = _on_host(tensors)
        chunks: Any = split_weight_chunks(on_host, self._bucket_size)
        async for meta, chunk in chunks:
            offset = -(-length // _ALIGNMENT) * _ALIGNMENT
            if metas and offset + meta.chunk_size > self._bucket_size:
                await self._send_bucket(metas, bucket[:length])
                num_bytes, num_buckets = num_bytes + length, num_buckets + 1
                metas, offset = [], 0
            length = offset + meta.chunk_size
            bucket[offset:length] = chunk
            metas.append(replace(meta, offset=offset))
        if metas:
            await self._send_bucket(metas, bucket[:length])
            num_bytes, num_buckets = num_bytes + length, num_buckets + 1
        await self._broadcast(torch.zeros(2, dtype=torch.int64))
        return {
            "psrl/weights/bytes": float(num_bytes),
            "psrl/weights/buckets": float(num_buckets),
            "psrl/weights/seconds": time.perf_counter() - start,
        }

    async def _send_bucket(self, metas: list[TensorMeta], bucket: Tensor) -> None:
        described = torch.frombuffer(bytearray(pickle.dumps(metas)), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(described), len(bucket)]))
        await self._broadcast(described)
        await self._broadcast(bucket)

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """An asynchronous iterator of (name, tensor) in the order they were sent. A tensor is the caller's to keep.

        Raises:
            RolloutError: there is no group.
        """
        if self._group is None:
            raise RolloutError(f"{GLOO_WEIGHTS}: weights are received between init_process_group and finalize only")
        chunks: Any = self._chunks()
        async for name, tensor in merge_weight_chunks(chunks, self._bucket_size):
            yield name, tensor

    async def _chunks(self) -> Any:
        sizes = torch.empty(2, dtype=torch.int64)
        while True:
            await self._broadcast(sizes)
            if not sizes[0]:
                return
            described, bucket = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
            await self._broadcast(described)
            await self._broadcast(bucket)
            for meta in pickle.loads(described.numpy().tobytes()):
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]

    async def _broadcast(self, tensor: Tensor) -> None:
        """From the sender to all; the event loop goes on meanwhile."""
        options = BroadcastOptions()
        options.rootRank = _SENDER
        work = self._group.broadcast([tensor], options)
        await asyncio.to_thread(work.wait)


async def _on_host(tensors: AsyncIterator[tuple[str, Tensor]]) -> Any:
    async for name, tensor in tensors:
        yield name, tensor.detach().cpu().contiguous()
