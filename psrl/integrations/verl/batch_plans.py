"""Samples, prefix tree and plans of a mini-batch, and making them while the mini-batch before it runs.

Planning is work of the host: nothing here touches a device or talks to other ranks, but for ``BatchPlans.plan``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tensordict import TensorDict

from psrl.integrations.verl.batch import samples_from_tensordict
from psrl.integrations.verl.routes import replayed_routes, take_routes
from psrl.routes import share_last_tokens, with_routes
from psrl.tree import build_tree
from psrl.types import ExecutionPlan

if TYPE_CHECKING:
    from psrl.integrations.verl.engine import PrefixSharingMixin

_TRAINING: ContextVar[PrefixSharingMixin | None] = ContextVar("psrl_training_engine", default=None)


class BatchPlans:
    """One mini-batch on the host. Made by any thread, then used by the one that runs the mini-batch."""

    def __init__(self, engine: PrefixSharingMixin, data: TensorDict, *, forward_only: bool) -> None:
        """
        Raises:
            PSRLError: the batch cannot be shared, or asks for what sharing rules out.
        """
        start = time.perf_counter()
        self._engine = engine
        self.data, self.route_task = take_routes(
            data, engine.engine_config.router_replay.mode, forward_only=forward_only
        )
        samples = samples_from_tensordict(self.data)
        self.routes = replayed_routes(self.route_task, self.data, samples, engine.tf_config)
        """Replayed ones, part of the samples' prefixes; None where nothing is replayed."""
        if self.routes is not None:
            if not engine.has_router_statistics:
                self.routes = share_last_tokens(samples, self.routes)
            samples = with_routes(samples, self.routes)
        self.samples = engine.sharing_system.prepare(samples, engine.max_tokens(self.data, forward_only))
        self.tree = build_tree(self.samples)
        """For all plans of the mini-batch, but for those that compute prefixes again (``psrl.kv_recompute``)."""
        self.asked: list[bool] = []
        """``forward_only`` of the plans that were asked for."""
        self._without_budget: dict[bool, ExecutionPlan] = {}
        self.seconds = time.perf_counter() - start
        """Of planning so far, whoever did it."""

    def prepare(self, kinds: Iterable[bool]) -> None:
        """Make the plans that will be asked for, as if the cache had no budget: it is known when the batch runs only.

        Args:
            kinds: ``forward_only`` of each.
        """
        start = time.perf_counter()
        for forward_only in kinds:
            self._without_budget[forward_only] = self._build(None, forward_only)
        self.seconds += time.perf_counter() - start

    def plan(self, *, forward_only: bool) -> ExecutionPlan:
        """The plan within what the cache may take now. Collective over ranks that share it where there is a budget.

        A plan whose peak fits the budget is the one that is made without a budget (``waves.plan_waves``).

        Raises:
            MemoryBudgetError: the budget is too small.
        """
        budget = self._engine.cache_budget()
        start = time.perf_counter()
        self.asked.append(forward_only)
        plan = self._without_budget.get(forward_only)
        if plan is None or (budget is not None and plan.stats.kv_bytes_peak > budget):
            plan = self._build(budget, forward_only)
        if not any(self._engine.chunk_layers):
            plan = dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, kv_bytes_peak=0))
        self.seconds += time.perf_counter() - start
        return plan

    def _build(self, budget: int | None, forward_only: bool) -> ExecutionPlan:
        max_tokens = self._engine.max_tokens(self.data, forward_only)
        return self._engine.build_plan(self.samples, self.tree, max_tokens, budget, forward_only=forward_only)


@contextlib.contextmanager
def training(engine: PrefixSharingMixin) -> Iterator[None]:
    """While active, ``planned_ahead`` plans for ``engine``."""
    token = _TRAINING.set(engine)
    try:
        yield
    finally:
        _TRAINING.reset(token)


def planned_ahead(mini_batches: Iterator[TensorDict]) -> Iterator[TensorDict]:
    """The same mini-batches; for an engine in training each is cut out and planned while the one before it runs.

    One thread does it, in order. What it raises is raised where it would be without it: when the mini-batch is asked
    for, or when the engine runs it.
    """
    engine = _TRAINING.get()
    if engine is None:
        yield from mini_batches
        return
    with ThreadPoolExecutor(1, thread_name_prefix="psrl-plan") as thread:

        def begin() -> tuple[Future[tuple[TensorDict, TensorDict] | None], Future[BatchPlans | None]]:
            fetched = thread.submit(_fetch, mini_batches)
            return fetched, thread.submit(_plan, engine, fetched)

        following = begin()
        while (fetched := following[0].result()) is not None:
            plans, following = following[1], begin()
            engine.expect_plans(fetched[0], plans)
            yield fetched[0]


def _fetch(mini_batches: Iterator[TensorDict]) -> tuple[TensorDict, TensorDict] | None:
    """The next mini-batch, twice: the worker adds keys to the one that it gets, while the other is planned."""
    data = next(mini_batches, None)
    return None if data is None else (data, data.copy())


def _plan(engine: PrefixSharingMixin, fetched: Future[tuple[TensorDict, TensorDict] | None]) -> BatchPlans | None:
    """Runs after ``fetched`` has, in its thread; None past the last mini-batch."""
    both = fetched.result()
    return None if both is None else engine.plan_update(both[1])
