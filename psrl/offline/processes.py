"""The processes of a training: those that ``torchrun`` started, or this one alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from psrl.errors import ConfigError, RankError
from psrl.integrations.verl import platform
from psrl.integrations.verl.job.rank_watch import RankWatch
from psrl.integrations.verl.local.worker import group_backend, init_single_process

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


_MEETING = 300.0
"""Least seconds to wait for all ranks at the start: a node may still be installing or importing."""


@dataclass(frozen=True)
class Processes:
    rank: int
    world_size: int


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[Processes]:
    """Be part of the process group, and end with an error that names the rank if another process dies. A group that
    there is already is used as it is.

    Args:
        timeout: seconds that collectives wait and a silent rank is given.

    Raises:
        ConfigError: the environment is that of a torchrun, but not all of it.
        RankError: another rank did not come, is gone or has failed.
    """
    platform.install()
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        init_single_process()
        yield Processes(dist.get_rank(), dist.get_world_size())
        return
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start the processes with torchrun")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world_size = _meet(max(timeout, _MEETING))
    dist.init_process_group(
        backend=group_backend(),
        store=PrefixStore("psrl", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    watch = RankWatch(store, rank, world_size, timeout)
    with watch.guard():
        yield Processes(rank, world_size)
        dist.barrier()  # nobody leaves, and with it perhaps the store, before all are through
    dist.destroy_process_group()


def _meet(timeout: float) -> tuple[Store, int, int]:
    """The store of all ranks, this rank, and how many there are."""
    try:
        return next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    except dist.DistError as error:  # pyright: ignore[reportAttributeAccessIssue]
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"the {os.environ['WORLD_SIZE']} ranks did not meet at {address} within {timeout:.0f} s: "
            f"{str(error).splitlines()[0]}"
        ) from error


def share_outputs(engine: Any, outputs: torch.Tensor | None, num_values: int, dtype: torch.dtype) -> torch.Tensor:
    """What the rank with a replica's outputs has, on every rank of the replica. Collective.

    Args:
        outputs: [num_values] on the rank for which ``engine.is_mp_src_rank_with_outputs()``; None on the others.
    """
    replica = _replica_ranks(engine)
    if len(replica.ranks) == 1:
        assert outputs is not None
        return outputs
    values = torch.empty(num_values, dtype=dtype) if outputs is None else outputs.to(dtype)
    dist.broadcast(values, src=replica.source, group=replica.group)
    return values


@dataclass(frozen=True)
class _Replica:
    ranks: tuple[int, ...]
    source: int
    group: Any


def _replica_ranks(engine: Any) -> _Replica:
    """The ranks that hold this rank's replica of the model; made once per engine."""
    if not hasattr(engine, "_psrl_replica"):
        mine = (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for index in range(engine.get_data_parallel_size()):
            ranks = tuple(rank for rank, (replica, _) in enumerate(everyone) if replica == index)
            group = dist.new_group(list(ranks), backend="gloo")
            if index == mine[0]:
                source = next(rank for rank in ranks if everyone[rank][1])
                engine._psrl_replica = _Replica(ranks, source, group)
    return engine._psrl_replica
