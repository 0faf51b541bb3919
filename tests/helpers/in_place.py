"""Engines that read the cached path in its blocks, watched: for Triton's interpreter and for a GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from psrl.cache import KVCache
from psrl.integrations.verl.engine import mini_batch
from psrl.runtime.attention import PathAccess
from psrl.runtime.path_tables import PathTables
from psrl.types import ExecutionPlan


@dataclass
class Watch:
    """What an engine did to its caches."""

    plans: list[ExecutionPlan] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """Of the cache's methods for micro-batches with a path, and of ``PathTables.drop``."""
    accumulator_dtypes: set[torch.dtype] = field(default_factory=set)
    saved_bytes: int = 0
    """Sum of all tensors that were saved for a backward."""

    @property
    def executions_with_path(self) -> int:
        """Over all passes."""
        return sum(
            bool(plan.micro_batches[index].path_blocks)
            for plan in self.plans
            for wave in plan.waves
            for index in (*wave.pass1, *wave.pass2)
        )

    @property
    def backwards_with_path(self) -> list[int]:
        """Path tokens of each micro-batch that had a backward and a path."""
        lens = [plan.micro_batches[i].path_len for plan in self.plans for wave in plan.waves for i in wave.pass2]
        return [path_len for path_len in lens if path_len]

    @property
    def longest_chain(self) -> int:
        """Most blocks of a path."""
        return max(len(mb.path_blocks) for plan in self.plans for mb in plan.micro_batches)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Counts calls of the cache and saved bytes of every engine of this process."""
    watch, run_plan = Watch(), mini_batch.run_plan
    methods = {name: getattr(KVCache, name) for name in ("read", "add_grads", "path_blocks", "path_grads")}

    def counted(name: str) -> Any:
        def call(cache: KVCache, micro_batch: int, *args: Any) -> Any:
            result = methods[name](cache, micro_batch, *args)
            if cache.plan.micro_batches[micro_batch].path_blocks:
                watch.calls[name] += 1
            if name == "path_grads":
                watch.accumulator_dtypes |= {x.dtype for x in (*result.k, *result.v)}
            return result

        return call

    drop = PathTables.drop

    def drop_counted(tables: PathTables) -> None:
        watch.calls["drop"] += 1
        drop(tables)

    def pack(x: torch.Tensor) -> torch.Tensor:
        watch.saved_bytes += x.nbytes
        return x

    def run(session: Any, *args: Any) -> None:
        watch.plans.append(session.plan)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run_plan(session, *args)

    mini_batch.run_plan = run
    PathTables.drop = drop_counted
    for name in methods:
        setattr(KVCache, name, counted(name))
    try:
        yield watch
    finally:
        mini_batch.run_plan, PathTables.drop = run_plan, drop
        for name, method in methods.items():
            setattr(KVCache, name, method)


def gather_path(worker: Any) -> Any:
    """The worker, made to gather the path whatever its attention can do."""
    worker.engine.__dict__["path_access"] = PathAccess(False, "for comparison")
    return worker
