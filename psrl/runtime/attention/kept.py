"""What attention of spine micro-batches made in pass 1, kept so that pass 2 does not compute it again.

Pass 2 runs a spine micro-batch's forward once more for its backward. A flash backward needs q, k, v, the output and the
log-sum-exp; the last two are those of pass 1 bit by bit, so that attention's part of that forward is reading them.
Whether an update keeps them is the plan's decision (``PlanStats.attention_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from psrl.errors import PlanError

KEEPING_BACKENDS = ("triton", "flash", "sdpa")
"""Backends whose backward starts from output and log-sum-exp."""

Made = tuple[Tensor, ...]
"""Output, log-sum-exp, and what else the backward of a backend wants."""


class KeptAttention:
    """Results of one model chunk, by micro-batch and layer."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Made] = {}
        self._live_bytes = 0
        self.peak_bytes = 0
        """Of outputs and log-sum-exps, so far."""

    def put(self, micro_batch: int, layer: int, made: Made) -> None:
        """Takes references, copies nothing.

        Raises:
            PlanError: pass 1 has put it there before.
        """
        if (micro_batch, layer) in self._made:
            raise PlanError(f"attention of micro-batch {micro_batch}, layer {layer}, is kept already")
        self._made[micro_batch, layer] = made
        self._live_bytes += _num_bytes(made)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def get(self, micro_batch: int, layer: int) -> Made:
        """
        Raises:
            PlanError: pass 1 has not put it there, or the backward has been.
        """
        made = self._made.get((micro_batch, layer))
        if made is None:
            raise PlanError(f"attention of micro-batch {micro_batch}, layer {layer}, was not kept")
        return made

    def drop(self, micro_batch: int, layer: int) -> None:
        """The backward of the layer's attention is done."""
        self._live_bytes -= _num_bytes(self._made.pop((micro_batch, layer)))

    def check_drained(self) -> None:
        """Raises:
        PlanError: results are left after the last micro-batch.
        """
        if self._made:
            raise PlanError(f"attention of micro-batches and layers {sorted(self._made)} is still kept")

    def close(self) -> None:
        """Drop everything, wherever the plan stopped. Can be called again."""
        self._made.clear()
        self._live_bytes = 0


class KeptResult(NamedTuple):
    """One attention call's place: pass 1 fills it, pass 2 reads it, under activation recompute several times."""

    kept: KeptAttention
    micro_batch: int
    layer: int
    is_filled: bool


def made_once(place: KeptResult | None, make: Callable[[], Made]) -> Made:
    """What ``make`` returns, or returned in pass 1; None: there is no place for it.

    The tensors are the caller's own, on shared storage: autograd marks those that a function returns.
    """
    if place is None:
        return make()
    kept, micro_batch, layer, is_filled = place
    if not is_filled:
        kept.put(micro_batch, layer, make())
    return tuple(x.detach() for x in kept.get(micro_batch, layer))


def _num_bytes(made: Made) -> int:
    return sum(x.numel() * x.element_size() for x in made[:2])
