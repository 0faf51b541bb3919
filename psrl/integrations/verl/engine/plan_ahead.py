"""Plans of an engine's mini-batches, made while the device or the caller does other work.

A worker says what will run (``forward_planned``, ``updates_planned``), a thread plans it, and the engine asks its
``BatchPlanner`` when it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import NamedTuple

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from psrl.integrations.verl.engine.batch_plans import BatchPlans, LastForward, LossFunction
from psrl.integrations.verl.engine.facts import EngineFacts

_THREAD = "psrl-plan"


class BatchPlanner:
    """The planner of one engine. ``last_forward`` may be shared with other engines on the same samples."""

    def __init__(self, facts: Callable[[], EngineFacts]) -> None:
        """
        Args:
            facts: of the engine as it is when a batch is planned.
        """
        self._facts = facts
        self.last_forward: LastForward | None = None
        self._expected: tuple[TensorDict, Future[BatchPlans] | Future[BatchPlans | None]] | None = None
        self._update_kinds: tuple[bool, ...] | None = None
        """``forward_only`` of the plans that the last update asked for."""

    def expect(self, data: TensorDict, plans: Future[BatchPlans] | Future[BatchPlans | None]) -> None:
        """``data`` is the next mini-batch to run, and ``plans`` are being made."""
        self._expected = (data, plans)

    def plans_of(self, data: TensorDict, loss_function: LossFunction | None, *, forward_only: bool) -> BatchPlans:
        """The plans that are expected for ``data``, or else new ones.

        Raises:
            PSRLError: the batch cannot be shared, or asks for what sharing rules out.
        """
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is data and (plans := expected[1].result()) is not None:
            return plans
        return self._new(data, loss_function, forward_only=forward_only)

    def plan_update(self, data: TensorDict, loss_function: LossFunction) -> BatchPlans:
        """Plans of a mini-batch whose turn has not come. In a thread of its own."""
        plans = self._new(data, loss_function, forward_only=False)
        plans.prepare(self._update_kinds or ((True, False) if self._facts().needs_router_loads else (False,)))
        return plans

    def plan_forward(self, data: TensorDict, loss_function: LossFunction | None) -> BatchPlans:
        """Plans of a forward-only batch that is about to run. In a thread of its own; adds to ``data``."""
        if "max_token_len_per_gpu" not in data.keys():  # noqa: SIM118  as upstream (engine_workers.py, infer_batch)
            tu.assign_non_tensor(data, max_token_len_per_gpu=self._facts().infer_max_token_len_per_gpu)
        plans = self._new(data, loss_function, forward_only=True)
        plans.prepare((True,))
        return plans

    def updated(self, plans: BatchPlans) -> None:
        """An update has run with these plans: the next will ask for as many."""
        self._update_kinds = tuple(plans.asked)

    def _new(self, data: TensorDict, loss_function: LossFunction | None, *, forward_only: bool) -> BatchPlans:
        return BatchPlans(self._facts(), data, loss_function, self.last_forward, forward_only=forward_only)


class _Updates(NamedTuple):
    planner: BatchPlanner
    loss_function: LossFunction


_UPDATES: ContextVar[_Updates | None] = ContextVar("psrl_planned_updates", default=None)


@contextlib.contextmanager
def forward_planned(planner: BatchPlanner, data: TensorDict, loss_function: LossFunction | None) -> Iterator[None]:
    """On entry a thread begins to plan ``data`` for a forward of an engine, which takes the plans when it runs."""
    with ThreadPoolExecutor(1, thread_name_prefix=_THREAD) as thread:
        planner.expect(data, thread.submit(planner.plan_forward, data.copy(), loss_function))
        yield


@contextlib.contextmanager
def updates_planned(planner: BatchPlanner, loss_function: LossFunction) -> Iterator[None]:
    """While active, ``planned_ahead`` plans for updates of an engine with this loss."""
    token = _UPDATES.set(_Updates(planner, loss_function))
    try:
        yield
    finally:
        _UPDATES.reset(token)


def planned_ahead(mini_batches: Iterator[TensorDict]) -> Iterator[TensorDict]:
    """The same mini-batches; within ``updates_planned`` each is cut out and planned while the one before it runs, the
    first from now on.

    One thread does it, in order. What it raises is raised where it would be without it: when the mini-batch is asked
    for, or when the engine runs it.
    """
    task = _UPDATES.get()
    if task is None:
        return mini_batches
    planner, loss_function = task
    thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)

    def begin() -> tuple[Future[tuple[TensorDict, TensorDict] | None], Future[BatchPlans | None]]:
        fetched = thread.submit(_fetch, mini_batches)
        return fetched, thread.submit(_plan, planner, fetched, loss_function)

    first = begin()

    def planned() -> Iterator[TensorDict]:
        following = first
        with thread:
            while (fetched := following[0].result()) is not None:
                plans, following = following[1], begin()
                planner.expect(fetched[0], plans)
                yield fetched[0]

    return planned()


def _fetch(mini_batches: Iterator[TensorDict]) -> tuple[TensorDict, TensorDict] | None:
    """The next mini-batch, twice: the worker adds keys to the one that it gets, while the other is planned."""
    data = next(mini_batches, None)
    return None if data is None else (data, data.copy())


def _plan(
    planner: BatchPlanner,
    fetched: Future[tuple[TensorDict, TensorDict] | None],
    loss_function: LossFunction,
) -> BatchPlans | None:
    """Runs after ``fetched`` has, in its thread; None past the last mini-batch."""
    both = fetched.result()
    return None if both is None else planner.plan_update(both[1], loss_function)
