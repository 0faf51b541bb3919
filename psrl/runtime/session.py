"""The running plan: micro-batches bound to a device, the cache they share, and the one that is in its forward.

Attention and its recomputation find their micro-batch through the object that travels with the layer's inputs (see
``integrations/megatron/packed.py``). Only what surrounds the layers in a forward (rotary table, output rows) asks
``active_micro_batch``.

Shape legend: T local tokens, R logit rows, E edges of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from psrl.cache import KVCache
from psrl.errors import PlanError
from psrl.runtime.attention import AttentionLayout
from psrl.types import ExecutionPlan, IntArray, MicroBatch

_ACTIVE: ContextVar[BoundMicroBatch | None] = ContextVar("psrl_active_micro_batch", default=None)


@dataclass(frozen=True)
class BoundMicroBatch:
    """A micro-batch of the plan with its tensors on the device, ready for a model forward."""

    plan: MicroBatch
    token_ids_T: Tensor
    position_ids_T: Tensor
    layout: AttentionLayout
    rows_R: Tensor
    """Local rows that reach the output layer; one dummy row where no edge is live, so that backward runs."""
    row_temperature_R: Tensor | None
    """None where every temperature is 1."""
    edges_E: Tensor
    edge_rows_E: Tensor
    edge_labels_E: Tensor

    @property
    def has_edges(self) -> bool:
        return len(self.edges_E) > 0


@dataclass(frozen=True)
class Execution:
    """One execution of a micro-batch: what the layers need to know."""

    micro_batch: BoundMicroBatch
    cache: KVCache
    backward: bool
    """Pass 2: a backward follows. Otherwise the forward is all, and a spine micro-batch writes its blocks."""
    attention_backend: str


class Session:
    """One plan on one rank and device. Binds micro-batches lazily and keeps them for both passes."""

    def __init__(self, plan: ExecutionPlan, *, num_layers: int, device: torch.device, attention_backend: str) -> None:
        self.plan = plan
        self.device = device
        self.attention_backend = attention_backend
        self.cache = KVCache(plan, num_layers)
        self._bound: dict[int, BoundMicroBatch] = {}

    def execution(self, index: int, *, backward: bool) -> Execution:
        return Execution(self._bind(index), self.cache, backward, self.attention_backend)

    @cached_property
    def _token_ids_U(self) -> Tensor:
        return self._tensor(self.plan.token_ids_U)

    @cached_property
    def _position_ids_U(self) -> Tensor:
        return self._tensor(self.plan.position_ids_U)

    @cached_property
    def _label_E(self) -> Tensor:
        return self._tensor(self.plan.edges.label_E)

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _bind(self, index: int) -> BoundMicroBatch:
        bound = self._bound.get(index)
        if bound is None:
            mb = self.plan.micro_batches[index]
            tokens = self._tensor(mb.tokens_T)
            edges = self._tensor(mb.edges_E)
            is_scaled = bool((mb.row_temperature_R != 1.0).any())
            bound = self._bound[index] = BoundMicroBatch(
                plan=mb,
                token_ids_T=self._token_ids_U[tokens],
                position_ids_T=self._position_ids_U[tokens],
                layout=AttentionLayout.build(mb.first_S, mb.last_S, mb.num_tokens),
                rows_R=self._tensor(mb.rows_R) if len(mb.rows_R) else tokens.new_zeros(1),
                row_temperature_R=torch.from_numpy(mb.row_temperature_R).to(self.device) if is_scaled else None,
                edges_E=edges,
                edge_rows_E=self._tensor(mb.edge_rows_E),
                edge_labels_E=self._label_E[edges],
            )
        return bound


@contextlib.contextmanager
def forwarding(micro_batch: BoundMicroBatch) -> Iterator[None]:
    """Mark ``micro_batch`` as the one whose model forward runs.

    Raises:
        PlanError: another forward is active: forwards do not nest.
    """
    if _ACTIVE.get() is not None:
        raise PlanError("a micro-batch forward is already active")
    token = _ACTIVE.set(micro_batch)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_micro_batch() -> BoundMicroBatch | None:
    """The micro-batch whose model forward runs now, None outside."""
    return _ACTIVE.get()
