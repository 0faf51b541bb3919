"""Seconds of a micro-batch on every pipeline stage of a rank, and of what surrounds the micro-batches.

Shape legend: V virtual stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psrl.cost import ATTENTION_BACKWARD, GEMM_BACKWARD
from psrl.model_sizes import ModelSizes
from psrl.simulate.calibration import Calibration, CallOverhead, Direction
from psrl.simulate.cluster import (
    ClusterLayout,
    Connections,
    all_reduce_seconds,
    gather_seconds,
    send_seconds,
)
from psrl.simulate.schedule import Pass
from psrl.simulate.work import Amounts, PassAmounts
from psrl.types import FloatArray

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of the parts of a pass; [V, M] each."""

    local: FloatArray
    """Of this rank alone."""
    experts: FloatArray
    """In the experts, if this rank's tokens were all its own experts get."""
    exchange: FloatArray
    """In collectives of the tensor, context and expert groups."""

    def plus(self, other: StageCosts) -> StageCosts:
        return StageCosts(self.local + other.local, self.experts + other.experts, self.exchange + other.exchange)

    @property
    def total(self) -> FloatArray:
        return self.local + self.experts + self.exchange


@dataclass(frozen=True, slots=True)
class CostModel:
    """Calibrated seconds for one model on one layout."""

    model: ModelSizes
    layout: ClusterLayout
    calibration: Calibration
    recompute: str = "none"
    distributed_optimizer: bool = True

    @property
    def connections(self) -> Connections:
        return Connections(self.layout, self.calibration)

    # --------------------------------------------------------------------------------------------- micro-batches
    def forward(self, run: PassAmounts, call: CallOverhead, *, with_entropy: bool = False) -> StageCosts:
        computed = [amounts.in_forward for amounts in run.micro_batches]
        return self._direction(computed, self.calibration.forward, call, (1.0, 1.0), with_entropy)

    def backward(self, run: PassAmounts, *, with_entropy: bool = False) -> StageCosts:
        """Recomputation included."""
        factors = (GEMM_BACKWARD, ATTENTION_BACKWARD)
        costs = self._direction(run.micro_batches, self.calibration.backward, None, factors, with_entropy)
        computed = [amounts.in_forward for amounts in run.micro_batches]
        if self.recompute == "full":
            return costs.plus(self._layers(computed, self.calibration.forward, (1.0, 1.0)))
        if self.recompute == "selective":
            again = self._attention(computed, self.calibration.forward, 1.0)
            return StageCosts(costs.local + again, costs.experts, costs.exchange)
        return costs

    def _direction(
        self,
        micro_batches: Sequence[Amounts],
        rate: Direction,
        call: CallOverhead | None,
        factors: tuple[float, float],
        with_entropy: bool,
    ) -> StageCosts:
        """Layers of every stage, the output layer on the last, and the fixed part of a micro-batch on each."""
        costs = self._layers(micro_batches, rate, factors)
        fixed = rate.per_micro_batch + (call.per_micro_batch if call is not None else 0.0)
        local = costs.local + fixed
        share = self.layout.tensor * self.layout.context
        rows_M = np.array([amounts.rows for amounts in micro_batches], dtype=float) / share
        flops = factors[0] * 2.0 * self.model.hidden_size * self.model.vocab_size
        local[-1] += rows_M * flops * rate.per_output_flop
        if with_entropy:
            local[-1] += rows_M * self.model.vocab_size * rate.per_entropy_value
        return StageCosts(local, costs.experts, costs.exchange)

    def _layers(self, micro_batches: Sequence[Amounts], rate: Direction, factors: tuple[float, float]) -> StageCosts:
        model, layout = self.model, self.layout
        layers_V = np.array(layout.layers_of_stages(model), dtype=float)[:, None]
        tokens_M = np.array([amounts.tokens for amounts in micro_batches], dtype=float)
        per_token = factors[0] * rate.per_gemm_flop * tokens_M / (layout.tensor * layout.context)
        dense = model.attention_flops_per_token + (0.0 if model.num_experts else model.mlp_flops_per_token)
        expanded = self._expanded_flops(micro_batches) * factors[0] * rate.per_gemm_flop
        local = layers_V * (rate.per_layer + dense * per_token + expanded)
        local = local + self._attention(micro_batches, rate, factors[1])
        experts = layers_V * (model.mlp_flops_per_token * per_token if model.num_experts else 0.0 * per_token)
        is_backward = factors[0] != 1.0
        exchange = layers_V * np.array([self._exchange(amounts, is_backward) for amounts in micro_batches])
        return StageCosts(local, experts, exchange)

    def _expanded_flops(self, micro_batches: Sequence[Amounts]) -> FloatArray:
        """[M] forward FLOPs of one layer to expand latents of other tokens than a rank's own: of the path, and of the
        tokens of other context-parallel ranks."""
        context = self.layout.context
        keys_M = np.array([a.path_tokens + a.tokens * (1 - 1 / context) for a in micro_batches], dtype=float)
        return keys_M * self.model.shape.flops_per_path_token / self.model.num_layers / self.layout.tensor

    def _attention(self, micro_batches: Sequence[Amounts], rate: Direction, factor: float) -> FloatArray:
        """[V, M] kernels on visible pairs, and the cached K/V that they read."""
        model, share = self.model, self.layout.tensor * self.layout.context
        layers_V = np.array(self.layout.layers_of_stages(model), dtype=float)[:, None]
        pairs_M, tiles_M, path_M = (
            np.array([getattr(amounts, name) for amounts in micro_batches], dtype=float)
            for name in ("pairs", "tiles", "path_tokens")
        )
        flops = factor * model.shape.flops_per_pair / model.num_layers
        cached = model.cached_values(self.layout.tensor)
        seconds_M = pairs_M * flops / share * rate.per_attention_flop + tiles_M * rate.per_tile
        seconds_M += path_M * cached / self.layout.context * rate.per_cached_value
        return layers_V * seconds_M

    def _exchange(self, amounts: Amounts, is_backward: bool) -> float:
        """Collectives of one layer: tensor (two reduce-scatters and all-gathers, a third gather in backward), context
        (K/V), experts (dispatch and combine)."""
        model, layout, links = self.model, self.layout, self.connections
        itemsize = self.calibration.dtype_bytes
        tokens = amounts.tokens / layout.context
        hidden_bytes = tokens * model.hidden_size * itemsize
        seconds = (5 if is_backward else 4) * gather_seconds(links.tensor, layout.tensor, hidden_bytes)
        kv_bytes = amounts.tokens * model.cached_values(layout.tensor) * itemsize
        seconds += gather_seconds(links.context, layout.context, kv_bytes)
        routed = hidden_bytes / layout.tensor * model.experts_per_token
        return seconds + 2 * gather_seconds(links.expert, layout.expert, routed)

    def transfer_seconds(self, micro_batches: Sequence[Amounts]) -> float:
        """From one pipeline stage to the next, for the mean micro-batch."""
        if self.layout.pipeline == 1 or not micro_batches:
            return 0.0
        tokens = sum(amounts.tokens for amounts in micro_batches) / len(micro_batches)
        values = tokens * self.model.hidden_size / (self.layout.context * self.layout.tensor)
        return send_seconds(self.connections.pipeline, values * self.calibration.dtype_bytes)

    # ------------------------------------------------------------------------------------------------ surroundings
    @staticmethod
    def call_seconds(call: CallOverhead, num_samples: int, num_tokens: int) -> float:
        return call.per_call + num_samples * call.per_sample + num_tokens * call.per_token

    @property
    def parameters_per_rank(self) -> tuple[float, float]:
        """(dense, expert) parameters on the fullest rank."""
        model, layout = self.model, self.layout
        layers = max(sum(layout.layers_of_stages(model)[stage :: layout.pipeline]) for stage in range(layout.pipeline))
        embeddings = model.embedding_parameters * (2 if layout.pipeline == 1 and not model.is_tied else 1)
        mlp = 0 if model.num_experts else model.expert_parameters
        dense = (layers * (model.attention_parameters + mlp) + embeddings) / layout.tensor
        experts = layers * model.num_experts * model.expert_parameters / (layout.tensor * layout.expert)
        return dense, float(experts)

    @property
    def gradient_seconds(self) -> float:
        """Reduction of a mini-batch's gradients over the data-parallel ranks, not overlapped, and, with the
        distributed optimizer, the gather of the new weights. Gradients are reduced in float32."""
        layout, links = self.layout, self.connections
        replicas = layout.data * layout.context
        dense, experts = self.parameters_per_rank
        seconds = 0.0
        for parameters, size in ((dense, replicas), (experts, replicas // layout.expert)):
            if not parameters:
                continue
            if self.distributed_optimizer:
                seconds += gather_seconds(links.data, size, 4 * parameters)
                seconds += gather_seconds(links.data, size, self.calibration.dtype_bytes * parameters)
            else:
                seconds += all_reduce_seconds(links.data, size, 4 * parameters)
        return seconds

    @property
    def optimizer_seconds(self) -> float:
        layout = self.layout
        dense, experts = self.parameters_per_rank
        if self.distributed_optimizer:
            replicas = layout.data * layout.context
            dense, experts = dense / replicas, experts / max(1, replicas // layout.expert)
        return (dense + experts) * self.calibration.per_optimizer_parameter


def expert_groups(costs: Sequence[StageCosts], size: int) -> list[StageCosts]:
    """Costs of data-parallel ranks that exchange tokens in every layer: nobody is faster than the slowest, and the
    experts' work is spread evenly over the group (a balanced router)."""
    if size == 1:
        return list(costs)
    out: list[StageCosts] = []
    for start in range(0, len(costs), size):
        group = costs[start : start + size]
        local = np.max([c.local for c in group], axis=0)
        exchange = np.max([c.exchange for c in group], axis=0)
        experts = np.mean([c.experts for c in group], axis=0)
        out += [StageCosts(local, experts, exchange)] * len(group)
    return out


def as_pass(forward: StageCosts, backward: StageCosts | None) -> Pass:
    return Pass(forward.total, None if backward is None else backward.total)
