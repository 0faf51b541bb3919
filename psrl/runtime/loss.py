"""Loss at completion: whole-sample losses whose edges live in several micro-batches.

The ledger holds every edge's outputs (log-prob, entropy, value) and their cotangents, the derivatives of the loss. A
sample's loss is evaluated once, at its first micro-batch in pass 2, with the outputs of ancestor micro-batches known
from pass 1. Each micro-batch then back-propagates ``sum(output * cotangent)`` over its own edges.

Edges are numbered by a plan, and a ledger takes micro-batches of that plan only. What two plans of the same samples
have in common is their targets, in sample order: ``for_edges`` carries a ledger over by them.

Shape legend: E edges of the plan, M targets, S samples, e edges of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.errors import LossError, PlanError
from psrl.runtime.session import BoundMicroBatch
from psrl.runtime.transfer import to_device
from psrl.types import Edges, IntArray

EvaluateLoss = Callable[[IntArray | None, dict[str, Tensor]], tuple[Tensor, dict[str, Any]]]
"""Loss of some samples (None: all) from their outputs. Takes sample indices and, per kind, a jagged nested tensor
[samples, tokens]: at each target's source token its output, ``absent`` elsewhere. Returns a scalar and metrics."""

_NOISE = 16.0
"""Derivatives may differ by so many times what they change by when outputs move by two units in the last place."""


class WholeLoss(NamedTuple):
    """The loss of all samples, evaluated at once."""

    loss: float
    metrics: dict[str, Any]


class _Placement(NamedTuple):
    """Where the targets of some samples go in their concatenation."""

    edges_M: Tensor
    targets_M: Tensor | slice
    positions_M: Tensor
    offsets: Tensor
    num_tokens: int


class LossLedger:
    """Outputs and cotangents of every edge, by kind (``log_probs``, ``entropy``, ``values``).

    ``record`` and ``complete`` mutate the ledger; the tensors that it hands out are new.
    """

    def __init__(
        self,
        edges: Edges,
        cu_seqlens: IntArray,
        *,
        kinds: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        absent: float = 0.0,
    ) -> None:
        """
        Args:
            edges: of one plan; micro-batches of others are refused.
            cu_seqlens: [S + 1] offsets of the samples.
            absent: what a loss finds where no target is predicted. 0 for losses that are known not to read it.
        """
        self._edges, self._cu_seqlens, self._device, self._dtype = edges, cu_seqlens, device, dtype
        self._absent = absent
        self.outputs = {kind: self._zeros(edges.num_edges) for kind in kinds}
        self.cotangents = {kind: self._zeros(edges.num_edges) for kind in kinds}
        self._target_cotangents = {kind: self._zeros(len(edges.target_edges_M)) for kind in kinds}
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def record(self, micro_batch: BoundMicroBatch, outputs_e: dict[str, Tensor]) -> None:
        """Store the outputs of a micro-batch's edges.

        Raises:
            PlanError: the micro-batch is of a plan that numbers edges differently.
        """
        self._check_plan(micro_batch)
        for kind, values in outputs_e.items():
            self.outputs[kind][micro_batch.edges_E] = values.detach().to(self._dtype)

    def complete(self, samples: IntArray, evaluate: EvaluateLoss) -> None:
        """Evaluate the loss of samples whose outputs are all recorded, and add its derivatives to the cotangents."""
        if len(samples):
            self._complete(self._place(samples), samples, evaluate)

    def complete_all(self, evaluate: EvaluateLoss) -> WholeLoss:
        """As ``complete`` of all samples at once, for losses that couple them.

        Raises:
            LossError: the loss is not finite.
        """
        loss, metrics = self._complete(self._everything, None, evaluate)
        whole = WholeLoss(float(loss), metrics)
        self._check_finite(whole.loss)
        return whole

    def _complete(
        self, place: _Placement, samples: IntArray | None, evaluate: EvaluateLoss
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics, grads = self._derivatives(self.outputs, place, samples, evaluate)
        self._loss_sum += loss  # stays on the device: nothing waits for it
        for kind, grad_M in grads.items():
            self.cotangents[kind].index_put_((place.edges_M,), grad_M, accumulate=True)
            self._target_cotangents[kind][place.targets_M] = grad_M
        return loss, metrics

    def surrogate(self, micro_batch: BoundMicroBatch, outputs_e: dict[str, Tensor]) -> Tensor:
        """Scalar whose gradient is that of the loss through this micro-batch's edges.

        Raises:
            PlanError: the micro-batch is of a plan that numbers edges differently.
        """
        self._check_plan(micro_batch)
        terms = [(values * self.cotangents[kind][micro_batch.edges_E]).sum() for kind, values in outputs_e.items()]
        return torch.stack(terms).sum()

    def for_edges(self, edges: Edges) -> LossLedger:
        """What this ledger knows of every target, for another plan of the same samples.

        Raises:
            PlanError: the targets are not the same.
        """
        ours, theirs = self._edges, edges
        if not (
            np.array_equal(ours.cu_targets, theirs.cu_targets)
            and np.array_equal(ours.target_positions_M, theirs.target_positions_M)
        ):
            raise PlanError("outputs of one plan are read for another whose samples have other targets")
        carried = LossLedger(
            edges,
            self._cu_seqlens,
            kinds=tuple(self.outputs),
            dtype=self._dtype,
            device=self._device,
            absent=self._absent,
        )
        from_M, to_M = self._everything.edges_M, carried._everything.edges_M
        for kind in self.outputs:
            carried.outputs[kind][to_M] = self.outputs[kind][from_M]
            carried.cotangents[kind].index_put_((to_M,), self._target_cotangents[kind], accumulate=True)
            carried._target_cotangents[kind].copy_(self._target_cotangents[kind])
        carried._loss_sum.copy_(self._loss_sum)
        return carried

    def sample_outputs(self) -> dict[str, Tensor]:
        """All recorded outputs as jagged nested tensors [S, tokens]: NaN where no target is predicted."""
        place = self._everything
        return {kind: _jagged(known[place.edges_M], place, math.nan) for kind, known in self.outputs.items()}

    def evaluate_all(self, evaluate: EvaluateLoss) -> WholeLoss:
        """The loss of all samples at once, without derivatives."""
        place = self._everything
        inputs = {kind: _jagged(known[place.edges_M], place, self._absent) for kind, known in self.outputs.items()}
        with torch.no_grad():
            loss, metrics = evaluate(None, inputs)
        return WholeLoss(float(loss), metrics)

    def check_separable(self, evaluate: EvaluateLoss, tolerance: float) -> WholeLoss:
        """Evaluate the loss on all samples at once: its derivatives have to be those that completions found.

        Derivatives are what is used, and do not cancel where losses do. Those of a sample may differ by ``tolerance``
        of their norm, or by what rounding of the outputs makes of them (a penalty at its minimum has nothing else).

        Raises:
            LossError: they differ, so the loss is no sum over samples; or the loss is not finite.
        """
        loss, metrics, whole = self._derivatives(self.outputs, self._everything, None, evaluate)
        found = self._target_cotangents
        excess_KS = self._norms({k: whole[k] - found[k] for k in whole}) - tolerance * self._norms(whole)
        worst = excess_KS.max() if excess_KS.numel() else loss.new_zeros(())
        whole_loss, parts, excess = torch.stack([loss.double(), self._loss_sum, worst.double()]).tolist()
        for value in (whole_loss, parts, excess):
            self._check_finite(value)
        if excess > 0:
            self._check_noise(evaluate, whole, excess_KS)
        return WholeLoss(whole_loss, metrics)

    def _check_finite(self, value: float) -> None:
        if math.isfinite(value):
            return
        reason = ""
        if self._absent != 0.0:
            reason = (
                ": outputs that are not computed are NaN (docs/support.md), and so is 0 times NaN; where the loss "
                "multiplies by a mask, select with torch.where instead"
            )
        raise LossError(f"the loss is not finite, or its derivative is not: {value}{reason}")

    def _check_noise(self, evaluate: EvaluateLoss, whole: dict[str, Tensor], excess_KS: Tensor) -> None:
        """Check that what exceeds the tolerance is rounding."""
        step = 2 * torch.finfo(self._dtype).eps
        moved = {kind: values + step * values.abs().clamp_min(1.0) for kind, values in self.outputs.items()}
        _, _, shifted = self._derivatives(moved, self._everything, None, evaluate)
        excess_KS = excess_KS - _NOISE * self._norms({kind: shifted[kind] - whole[kind] for kind in whole})
        kind, sample = divmod(int(excess_KS.argmax()), self._num_samples)
        if float(excess_KS[kind, sample]) > 0:
            alone, together = (float(self._norms(x)[kind, sample]) for x in (self._target_cotangents, whole))
            raise LossError(
                f"the loss is not a sum over samples: its derivative by the {list(whole)[kind]} of sample {sample} has "
                f"norm {alone:.8g} where the sample is evaluated alone, and {together:.8g} with the whole mini-batch; "
                "set psrl.loss_scope=mini_batch"
            )

    # -------------------------------------------------------------------------------------------------- evaluation
    def _derivatives(
        self, outputs: Mapping[str, Tensor], place: _Placement, samples: IntArray | None, evaluate: EvaluateLoss
    ) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        """Loss, metrics and [M] derivatives by the outputs of the placed targets."""
        leaves = {kind: known[place.edges_M].requires_grad_() for kind, known in outputs.items()}
        with torch.enable_grad():
            loss, metrics = evaluate(samples, {kind: _jagged(x, place, self._absent) for kind, x in leaves.items()})
        if not loss.requires_grad:
            return loss, metrics, {kind: torch.zeros_like(leaf) for kind, leaf in leaves.items()}
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return loss.detach(), metrics, dict(zip(leaves, grads, strict=True))

    def _norms(self, values: Mapping[str, Tensor]) -> Tensor:
        """[kinds, S] norms of the samples' parts of [M] values."""
        squares = [self._zeros(self._num_samples).index_add_(0, self._sample_M, x.square()) for x in values.values()]
        return torch.stack(squares).sqrt() if squares else self._zeros(0)

    @property
    def _num_samples(self) -> int:
        return len(self._cu_seqlens) - 1

    @cached_property
    def _sample_M(self) -> Tensor:
        counts_S = np.diff(self._edges.cu_targets)
        return to_device(np.repeat(np.arange(self._num_samples), counts_S), self._device)

    # ------------------------------------------------------------------------------------------------ placement
    def _check_plan(self, micro_batch: BoundMicroBatch) -> None:
        if micro_batch.edges is not self._edges:
            raise PlanError("a ledger of one plan was given a micro-batch of another: their edges differ")

    @cached_property
    def _everything(self) -> _Placement:
        edges, cu = self._edges, self._cu_seqlens
        return self._to_device(edges.target_edges_M, slice(None), edges.target_positions_M, cu)

    def _place(self, samples: IntArray) -> _Placement:
        edges, cu = self._edges, self._cu_seqlens
        starts, stops = edges.cu_targets[samples], edges.cu_targets[samples + 1]
        chosen = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        seqlens = np.diff(cu)[samples]
        shift = np.concatenate([[0], np.cumsum(seqlens)[:-1]]) - cu[samples]
        positions = edges.target_positions_M[chosen] + np.repeat(shift, stops - starts)
        offsets = np.concatenate([[0], np.cumsum(seqlens)])
        return self._to_device(edges.target_edges_M[chosen], chosen, positions, offsets)

    def _to_device(
        self, edges_M: IntArray, targets_M: IntArray | slice, positions_M: IntArray, offsets: IntArray
    ) -> _Placement:
        return _Placement(
            to_device(edges_M, self._device),
            targets_M if isinstance(targets_M, slice) else to_device(targets_M, self._device),
            to_device(positions_M, self._device),
            to_device(offsets, self._device),
            int(offsets[-1]),
        )


def _jagged(values_M: Tensor, place: _Placement, absent: float) -> Tensor:
    flat = values_M.new_full((place.num_tokens,), absent).index_put((place.positions_M,), values_M)
    return torch.nested.nested_tensor_from_jagged(flat, offsets=place.offsets)
