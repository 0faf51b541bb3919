"""Loss at completion: whole-sample losses whose edges live in several micro-batches.

The ledger holds every edge's outputs (log-prob, entropy, value) and their cotangents, the derivatives of the loss. A
sample's loss is evaluated once, at its first micro-batch in pass 2, with the outputs of ancestor micro-batches known
from pass 1. Each micro-batch then back-propagates ``sum(output * cotangent)`` over its own edges.

Shape legend: E edges of the plan, M targets, S samples, e edges of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.errors import LossError
from psrl.runtime.session import BoundMicroBatch
from psrl.runtime.transfer import to_device
from psrl.types import Edges, IntArray

EvaluateLoss = Callable[[IntArray | None, dict[str, Tensor]], Tensor]
"""Loss of some samples (None: all) from their outputs. Takes sample indices and, per kind, a jagged nested tensor
[samples, tokens]: at each target's source token its output, 0 elsewhere. Returns a scalar."""


class _Placement(NamedTuple):
    """Where the targets of some samples go in their concatenation."""

    edges_M: Tensor
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
    ) -> None:
        self._edges, self._cu_seqlens, self._device = edges, cu_seqlens, device
        self.outputs = {kind: torch.zeros(edges.num_edges, dtype=dtype, device=device) for kind in kinds}
        self.cotangents = {kind: torch.zeros(edges.num_edges, dtype=dtype, device=device) for kind in kinds}
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def loss_sum(self) -> float:
        """Sum of the losses evaluated at completions."""
        return float(self._loss_sum)

    def record(self, micro_batch: BoundMicroBatch, outputs_e: dict[str, Tensor]) -> None:
        """Store the outputs of a micro-batch's edges."""
        for kind, values in outputs_e.items():
            self.outputs[kind][micro_batch.edges_E] = values.detach().to(self.outputs[kind].dtype)

    def complete(self, samples: IntArray | None, evaluate: EvaluateLoss) -> None:
        """Evaluate the loss of samples whose outputs are all recorded, and add its derivatives to the cotangents."""
        if samples is not None and not len(samples):
            return
        place = self._place(samples)
        leaves = {kind: known[place.edges_M].requires_grad_() for kind, known in self.outputs.items()}
        with torch.enable_grad():
            loss = evaluate(samples, {kind: self._jagged(leaf, place) for kind, leaf in leaves.items()})
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
        self._loss_sum += loss.detach()  # stays on the device: nothing waits for it
        for total, grad in zip(self.cotangents.values(), grads, strict=False):
            if grad is not None:
                total.index_put_((place.edges_M,), grad, accumulate=True)

    def surrogate(self, micro_batch: BoundMicroBatch, outputs_e: dict[str, Tensor]) -> Tensor:
        """Scalar whose gradient is that of the loss through this micro-batch's edges."""
        terms = [(values * self.cotangents[kind][micro_batch.edges_E]).sum() for kind, values in outputs_e.items()]
        return torch.stack(terms).sum()

    def sample_outputs(self) -> dict[str, Tensor]:
        """All recorded outputs as jagged nested tensors [S, tokens]: 0 where no target is predicted."""
        place = self._place(None)
        return {kind: self._jagged(known[place.edges_M], place) for kind, known in self.outputs.items()}

    def check_sum(self, whole: float, tolerance: float) -> None:
        """The losses at completions add up to the loss of the whole mini-batch.

        Raises:
            LossError: they do not, so the loss is no sum over samples; or they are not finite.
        """
        parts = self.loss_sum
        if not (math.isfinite(whole) and math.isfinite(parts)):
            raise LossError(
                f"the loss is not finite: {whole:.8g} on the whole mini-batch, {parts:.8g} sample by sample"
            )
        if not abs(whole - parts) <= tolerance * max(1.0, abs(whole), abs(parts)):
            raise LossError(
                f"the loss is not a sum over samples: evaluated sample by sample it is {parts:.8g}, on the "
                f"whole mini-batch {whole:.8g}; set psrl.loss_scope=mini_batch"
            )

    # ------------------------------------------------------------------------------------------------ placement
    def _place(self, samples: IntArray | None) -> _Placement:
        edges, cu = self._edges, self._cu_seqlens
        if samples is None:
            chosen, seqlens = slice(None), np.diff(cu)
            positions = edges.target_positions_M
        else:
            starts, stops = edges.cu_targets[samples], edges.cu_targets[samples + 1]
            chosen = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
            seqlens = np.diff(cu)[samples]
            shift = np.concatenate([[0], np.cumsum(seqlens)[:-1]]) - cu[samples]
            positions = edges.target_positions_M[chosen] + np.repeat(shift, stops - starts)
        offsets = np.concatenate([[0], np.cumsum(seqlens)])
        return _Placement(
            to_device(edges.target_edges_M[chosen], self._device),
            to_device(positions, self._device),
            to_device(offsets, self._device),
            int(offsets[-1]),
        )

    @staticmethod
    def _jagged(values_M: Tensor, place: _Placement) -> Tensor:
        flat = values_M.new_zeros(place.num_tokens).index_put((place.positions_M,), values_M)
        return torch.nested.nested_tensor_from_jagged(flat, offsets=place.offsets)
