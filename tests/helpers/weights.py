"""What a rank does to send weights, or to receive them, as veRL's ``CheckpointEngineManager`` has it do."""

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.integrations.verl.trainer.gloo_weights import GlooWeights


def stream(version: int) -> Iterator[tuple[str, Tensor]]:
    """Weights of a version: odd sizes, several dtypes, one tensor under two names, one that is not contiguous."""
    embedding = torch.arange(15, dtype=torch.float32).reshape(3, 5) / 7 + version
    embedding[0, 0] = float("nan")
    yield "embed", embedding
    yield "norm", torch.arange(7, dtype=torch.bfloat16) / 3 - version
    yield "lm_head", embedding
    yield "scale", torch.tensor(version / 3, dtype=torch.float64)
    yield "proj", (torch.arange(40, dtype=torch.float32) / 9 + version).reshape(8, 5).T
    yield "steps", torch.tensor([version, 2**40])


def exchange(num_trainers: int, bucket_size: int, num_updates: int) -> list[Any]:
    """What this rank has of every update: the sender its metrics, a trainer beside it the number of tensors that it
    produced, a replica what it received."""
    rank, size = dist.get_rank(), dist.get_world_size()
    trainers = dist.new_group(list(range(num_trainers)))
    engine = GlooWeights(bucket_size, is_master=rank == 0)
    return [_update(engine, version, rank, size, num_trainers, trainers) for version in range(1, num_updates + 1)]


def _update(engine: GlooWeights, version: int, rank: int, size: int, num_trainers: int, trainers: Any) -> Any:
    metadata: list[Any] = [None] * size
    dist.all_gather_object(metadata, engine.prepare())
    of_trainers, of_replicas = GlooWeights.build_topology(num_trainers, size - num_trainers, metadata)
    engine.init_process_group(**{key: (of_trainers[key] + of_replicas[key])[rank] for key in of_trainers})
    produced = []

    def produce() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream(version):
            dist.barrier(trainers)  # as with a gather over tensor-parallel ranks
            produced.append(name)
            yield name, tensor

    async def receive() -> list[tuple[str, Tensor]]:
        received = [(name, tensor) async for name, tensor in engine.receive_weights(version)]
        return [(name, tensor.clone()) for name, tensor in received]  # after the last: they are the receiver's

    if rank >= num_trainers:
        result: Any = asyncio.run(receive())
    else:
        metrics = asyncio.run(engine.send_weights(produce(), version))
        result = metrics if rank == 0 else (metrics, len(produced))
    engine.finalize()
    return result
