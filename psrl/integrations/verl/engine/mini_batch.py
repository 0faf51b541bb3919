"""One ``forward_backward_batch`` with prefix sharing: plan, passes, loss at completion, upstream's output format."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import postprocess_batch_func

from psrl.cache import CacheBytes
from psrl.integrations.megatron.passes import replica_groups, run_plan, shared_plan_group
from psrl.integrations.megatron.router_options import expert_layer_numbers
from psrl.integrations.verl.engine.batch import RowSelector
from psrl.integrations.verl.engine.batch_plans import BatchPlans, LossFunction
from psrl.integrations.verl.engine.facts import EngineFacts
from psrl.integrations.verl.engine.loss_scope import Targets, log_extra_forward, resolve_loss_scope, targets_of
from psrl.integrations.verl.engine.routes import FIELD, sample_experts
from psrl.routes import unique_experts
from psrl.runtime.loss import LossLedger, WholeLoss
from psrl.runtime.routes import TokenRoutes
from psrl.runtime.routing import RouterLoads
from psrl.runtime.session import BoundMicroBatch, RouterSamples
from psrl.types import ExecutionPlan, IntArray, PlanStats

OnEdges = Callable[[BoundMicroBatch, dict[str, Tensor], bool], Tensor]
"""Called with a micro-batch, the outputs [E] of its edges by kind, and whether a backward follows. Returns the scalar
to differentiate, ignored without a backward."""

_SUM_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Of the norm of a sample's derivatives, where they are evaluated alone and with the whole mini-batch."""


class RunnableModel(NamedTuple):
    """An engine's model, as a mini-batch runs it."""

    chunks: Sequence[nn.Module]
    """One for each virtual pipeline stage of this rank, as the engine holds them."""
    edge_outputs: Callable[[BoundMicroBatch, Tensor, bool], dict[str, Tensor]]
    """From a micro-batch, the rows [1, R, columns] of its forward and whether entropies are wanted, to outputs [E]."""
    data_parallel_group: Any


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What an engine's last ``forward_backward_batch`` did."""

    stats: PlanStats
    kv_bytes: CacheBytes
    """Measured."""
    kv_bytes_predicted: CacheBytes
    """By the plans, of which an update may have two."""
    planning_seconds: float
    """Of planning, whether a pass waited for it or another one ran meanwhile."""
    planning_wait_seconds: float
    """What was waited for."""
    seconds: float
    attention_bytes: int = 0
    """Measured peak of attention's results that the update kept for its second pass."""

    @property
    def kv_bytes_measured(self) -> int:
        """Peak on the device."""
        return self.kv_bytes.device_peak


class MiniBatchRun:
    """Runs one mini-batch. Use once: ``forward`` or ``update``, then ``report``."""

    def __init__(
        self,
        facts: EngineFacts,
        model: RunnableModel,
        data: TensorDict,
        loss_function: LossFunction | None,
        plans: BatchPlans,
        waited: float,
    ) -> None:
        """
        Args:
            data: on the device.
            plans: of the same rows.
            waited: seconds, for ``plans``.
        """
        self._start = time.perf_counter() - waited
        self._planning_wait_seconds = waited
        self._facts, self._model, self._loss_function = facts, model, loss_function
        self._plans, self._samples = plans, plans.samples
        self._rows = RowSelector(data)
        self._with_entropy = bool(tu.get_non_tensor_data(data, key="calculate_entropy", default=False))
        self._kinds = ("values",) if facts.is_value_model else ("log_probs", "entropy")[: 1 + self._with_entropy]
        self._kv_bytes, self._kv_bytes_predicted = CacheBytes(), CacheBytes()
        self._attention_bytes = 0
        self._plan: ExecutionPlan | None = None
        self._loads: RouterLoads | None = None
        self._recorded: TokenRoutes | None = None

    def forward(self) -> dict[str, Any]:
        """Outputs of all samples; the loss too, if there is a loss function. No gradients."""
        ledger, plan = self._run_forward()
        whole = WholeLoss(1.0, {})
        if self._loss_function is not None and _has_outputs():
            whole = ledger.evaluate_all(self._evaluate)
        output = self._output(ledger, whole)
        if self._plans.route_task.is_recording:
            experts = self._recorded_experts(plan)
            if output:
                output["model_output"][FIELD] = experts
        return output

    def update(self) -> dict[str, Any]:
        """Outputs, loss and metrics of all samples; adds the loss's gradients to the parameters.

        A mini-batch without any target has loss 0 and zero gradients; upstream divides 0 by 0. A loss of the user's is
        called all the same.
        """
        assert self._loss_function is not None
        num_targets = tu.get_non_tensor_data(self._rows.data, key="batch_num_tokens", default=0)
        has_loss = num_targets > 0 or targets_of(self._loss_function) is not Targets.LOSS_MASK
        scope = resolve_loss_scope(self._facts.settings.loss_scope, self._loss_function, self._rows.data)
        whole = WholeLoss(0.0, {})
        if scope == "mini_batch" and has_loss:
            known, _ = self._run_forward(for_update=True)
            if _has_outputs():
                whole = known.complete_all(self._evaluate)
            plan = self._build_plan(forward_only=False)
            ledger = known.for_edges(plan.edges)
            self._run(plan, lambda micro_batch, outputs, backward: ledger.surrogate(micro_batch, outputs))
            return self._output(ledger, whole)

        if self._facts.needs_router_loads:
            self._run_forward(for_update=True)
        plan = self._build_plan(forward_only=False)
        ledger = self._new_ledger(plan)

        def on_edges(micro_batch: BoundMicroBatch, outputs: dict[str, Tensor], backward: bool) -> Tensor:
            ledger.record(micro_batch, outputs)
            if not backward:
                return next(iter(outputs.values())).sum()
            ledger.complete(micro_batch.plan.completes, self._evaluate)
            return ledger.surrogate(micro_batch, outputs)

        self._run(plan, on_edges)
        if has_loss and _has_outputs():
            # Once more on the whole mini-batch: metrics that do not depend on the plan, and proof that the loss is a
            # sum over samples.
            whole = ledger.check_separable(self._evaluate, _SUM_TOLERANCE[self._facts.output_dtype])
        return self._output(ledger, whole)

    def report(self) -> BatchReport:
        assert self._plan is not None
        return BatchReport(
            stats=self._plan.stats,
            kv_bytes=self._kv_bytes,
            kv_bytes_predicted=self._kv_bytes_predicted,
            planning_seconds=self._plans.seconds,
            planning_wait_seconds=self._planning_wait_seconds,
            seconds=time.perf_counter() - self._start,
            attention_bytes=self._attention_bytes,
        )

    # --------------------------------------------------------------------------------------------------- passes
    def _run_forward(self, *, for_update: bool = False) -> tuple[LossLedger, ExecutionPlan]:
        """All outputs, in one forward-only pass, and its plan; ahead of an update it also counts experts' loads."""
        if for_update and self._facts.needs_router_loads:
            log_extra_forward("moe_router_load_balancing_type aux_loss needs every expert's load")
            self._loads = RouterLoads(self._samples.num_tokens)
        plan = self._build_plan(forward_only=True)
        ledger = self._new_ledger(plan)

        def on_edges(micro_batch: BoundMicroBatch, outputs: dict[str, Tensor], backward: bool) -> Tensor:
            ledger.record(micro_batch, outputs)
            return next(iter(outputs.values())).sum()

        self._run(plan, on_edges)
        if self._loads is not None:
            self._loads.finish(shared_plan_group())
        return ledger, plan

    def _run(self, plan: ExecutionPlan, on_edges: OnEdges) -> None:
        session = self._facts.new_session(plan, self._router_samples(plan), self._token_routes(plan))

        def on_output(micro_batch: BoundMicroBatch, output: Tensor, backward: bool) -> Tensor:
            outputs = self._model.edge_outputs(micro_batch, output, self._with_entropy)
            loss = on_edges(micro_batch, outputs, backward)
            # Without an edge, backward still has to run: descendants' gradients wait at the K/V taps.
            return loss if micro_batch.has_edges or not backward else loss + 0.0 * output.sum()

        run_plan(session, self._model.chunks, on_output)
        self._kv_bytes = self._kv_bytes.then(session.cache_bytes)
        self._attention_bytes = max(self._attention_bytes, session.attention_bytes)
        self._kv_bytes_predicted = self._kv_bytes_predicted.then(CacheBytes.predicted(plan.stats))

    def _router_samples(self, plan: ExecutionPlan) -> RouterSamples | None:
        if not self._facts.has_router_statistics:
            return None
        token_counts_U = np.bincount(plan.index_N)  # samples that hold each unique token
        return RouterSamples(token_counts_U, self._samples.num_tokens, self._loads, is_counting=plan.forward_only)

    # --------------------------------------------------------------------------------------------------- routes
    def _token_routes(self, plan: ExecutionPlan) -> TokenRoutes | None:
        layers, device = self._facts.expert_layers, self._facts.device
        if self._plans.route_task.is_recording:
            self._recorded = TokenRoutes.recording(
                (len(plan.token_ids_U), self._facts.megatron.moe_router_topk), layers, device
            )
            return self._recorded
        if self._plans.routes is None:
            return None
        index = {layer: index for index, layer in enumerate(expert_layer_numbers(self._facts.megatron))}
        own = {layer: index[layer] for layer in layers}
        return TokenRoutes.replaying(unique_experts(self._plans.routes, plan.index_N), own, device)

    def _recorded_experts(self, plan: ExecutionPlan) -> Tensor:
        """What the run of ``plan`` recorded. Collective over the ranks of the replica."""
        assert self._recorded is not None
        layers = expert_layer_numbers(self._facts.megatron)
        experts_ULK = self._recorded.joined(layers, replica_groups())
        return sample_experts(experts_ULK, plan.index_N, self._samples.cu_seqlens)

    # ----------------------------------------------------------------------------------------------------- plans
    def _build_plan(self, *, forward_only: bool) -> ExecutionPlan:
        before = self._plans.seconds
        self._plan = self._plans.plan(forward_only=forward_only)
        self._planning_wait_seconds += self._plans.seconds - before
        return self._plan

    def _new_ledger(self, plan: ExecutionPlan) -> LossLedger:
        return LossLedger(
            plan.edges,
            self._samples.cu_seqlens,
            kinds=self._kinds,
            dtype=self._facts.output_dtype,
            device=self._facts.device,
            # Some of veRL's losses multiply by the loss mask what they do not read: NaN would stay.
            absent=0.0 if targets_of(self._loss_function) is Targets.LOSS_MASK else math.nan,
        )

    # ----------------------------------------------------------------------------------------------------- loss
    def _evaluate(self, samples: IntArray | None, outputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """veRL's loss of some samples, or of all, and its metrics.

        A rank without rows has loss 0 and no metrics: upstream's losses cannot be called on none.
        """
        if not self._samples.num_samples:
            return torch.zeros((), dtype=self._facts.output_dtype, device=self._facts.device), {}
        data = self._rows.data if samples is None else self._rows.select(samples)
        assert self._loss_function is not None
        return self._loss_function(model_output=outputs, data=data, dp_group=self._model.data_parallel_group)

    def _output(self, ledger: LossLedger, whole: WholeLoss) -> dict[str, Any]:
        if not _has_outputs():
            return {}
        output = {"model_output": ledger.sample_outputs(), "loss": whole.loss, "metrics": whole.metrics}
        if not self._samples.num_samples:  # upstream cannot join jagged tensors of no rows
            return {**output, "loss": [whole.loss]}
        return postprocess_batch_func([output], indices=[list(range(self._samples.num_samples))], data=self._rows.data)


def _has_outputs() -> bool:
    """Whether this rank's pipeline stage is the last: it has every edge's outputs, others have none."""
    return mpu.is_pipeline_last_stage(ignore_virtual=True)
