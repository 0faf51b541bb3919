"""Samples, prefix tree and plans of a mini-batch.

Planning is work of the host: nothing here touches a device or talks to other ranks, but for ``BatchPlans.plan``. When
it begins, ``plan_ahead`` says; what the phases of a step have in common is made once (``LastForward``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from psrl.integrations.verl.engine.batch import samples_from_tensordict
from psrl.integrations.verl.engine.facts import EngineFacts, PlanOptions
from psrl.integrations.verl.engine.fused_options import check_fused_batch
from psrl.integrations.verl.engine.loss_scope import targets_of
from psrl.integrations.verl.engine.routes import replayed_routes, take_routes
from psrl.kept_attention import keep_attention
from psrl.planner import build_plan
from psrl.routes import share_last_tokens, with_routes
from psrl.tree import PrefixTree, build_tree
from psrl.types import ExecutionPlan, SampleBatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
"""As ``TrainingWorker.set_loss_fn`` takes it."""


class SampleTree:
    """Samples, their prefix tree, and the plans that were made of them. All are functions of the samples alone."""

    def __init__(self, samples: SampleBatch, tree: PrefixTree | None = None) -> None:
        self.samples = samples
        self.tree: PrefixTree = tree or build_tree(samples)
        """For all plans, but for those that compute prefixes again (``psrl.kv_recompute``)."""
        self._plans: dict[Hashable, ExecutionPlan] = {}

    def plan(self, **options: Unpack[PlanOptions]) -> ExecutionPlan:
        """``build_plan`` with these options; a second time, the plan of the first."""
        key = tuple(sorted(options.items(), key=lambda item: item[0]))
        if key not in self._plans:
            self._plans[key] = build_plan(self.samples, tree=self.tree, **options)
        return self._plans[key]


class LastForward:
    """Remembers the last forward-only batch of the engines that share it.

    Old log-prob and reference of a step are forwards of the same samples, which a worker runs one after the other: the
    second finds the tree and the plan of the first. An update finds the tree if it has one mini-batch. What is
    remembered stays in the host's memory until another forward.
    """

    def __init__(self) -> None:
        self._last: SampleTree | None = None

    def tree_of(self, samples: SampleBatch, *, forward_only: bool) -> SampleTree:
        """The one remembered where its samples are these, by value; a new one, remembered if ``forward_only``.

        The tree is the same where other tokens of the same samples are targets.
        """
        last, tree = self._last, None
        if last is not None and _equal(dataclasses.replace(last.samples, target_mask_N=samples.target_mask_N), samples):
            if np.array_equal(last.samples.target_mask_N, samples.target_mask_N):
                return last
            tree = last.tree
        made = SampleTree(samples, tree)
        if forward_only:
            self._last = made
        return made


def _equal(a: SampleBatch, b: SampleBatch) -> bool:
    """Every array of them, by value."""
    pairs = ((getattr(a, each.name), getattr(b, each.name)) for each in dataclasses.fields(SampleBatch))
    return all(x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs)


class BatchPlans:
    """One mini-batch on the host. Made by any thread, then used by the one that runs the mini-batch."""

    def __init__(
        self,
        facts: EngineFacts,
        data: TensorDict,
        loss_function: LossFunction | None,
        last_forward: LastForward | None,
        *,
        forward_only: bool,
    ) -> None:
        """
        Args:
            loss_function: decides which outputs are computed.
            last_forward: what is remembered of an earlier batch; None: nothing is.

        Raises:
            PSRLError: the batch cannot be shared, or asks for what sharing rules out.
        """
        start = time.perf_counter()
        self._facts = facts
        self.data, self.route_task = take_routes(data, facts.router_replay_mode, forward_only=forward_only)
        samples = samples_from_tensordict(self.data, targets_of(loss_function))
        fused = facts.use_fused_kernels
        asked = tu.get_non_tensor_data(self.data, key="use_fused_kernels", default=fused)
        check_fused_batch(asked, fused, samples.temperatures_S)
        self.routes = replayed_routes(self.route_task, self.data, samples, facts.megatron)
        """Replayed ones, part of the samples' prefixes; None where nothing is replayed."""
        if self.routes is not None:
            if not facts.has_router_statistics:
                self.routes = share_last_tokens(samples, self.routes)
            samples = with_routes(samples, self.routes)
        samples = facts.system.prepare(samples, facts.max_tokens(self.data, forward_only=forward_only))
        self._made = last_forward.tree_of(samples, forward_only=forward_only) if last_forward else SampleTree(samples)
        self.samples = self._made.samples
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

        A plan whose peak fits the budget is the one that is made without a budget (``waves.plan_waves``), but for what
        it keeps of attention.

        Raises:
            MemoryBudgetError: the budget is too small.
        """
        budget = self._facts.cache_budget()
        start = time.perf_counter()
        self.asked.append(forward_only)
        plan = self._without_budget.get(forward_only)
        if plan is None or (budget is not None and plan.stats.kv_bytes_peak > budget):
            plan = self._build(budget, forward_only)
        elif budget is not None:
            options = self._options(budget, forward_only)
            plan = keep_attention(plan, options["shape"], options["footprint"])
        if not self._facts.has_layers:
            plan = dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, kv_bytes_peak=0, attention_bytes=0))
        self.seconds += time.perf_counter() - start
        return plan

    def _build(self, budget: int | None, forward_only: bool) -> ExecutionPlan:
        return self._made.plan(**self._options(budget, forward_only))

    def _options(self, budget: int | None, forward_only: bool) -> PlanOptions:
        max_tokens = self._facts.max_tokens(self.data, forward_only=forward_only)
        return self._facts.plan_options(max_tokens, budget, forward_only=forward_only)
