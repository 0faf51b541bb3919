"""The amounts of work in a micro-batch, from psrl's plans and from packed sequences.

Shape legend: M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psrl.types import ExecutionPlan, IntArray, MicroBatch, SampleBatch


class Amounts(NamedTuple):
    """What a micro-batch's cost follows from. All of the whole micro-batch, before it is split over ranks."""

    tokens: int
    pairs: int
    """Visible (query, key) pairs."""
    rows: int
    """Rows of the output layer."""
    tiles: int
    """Calls of an attention kernel in a layer."""
    path_tokens: int
    """Cached tokens that it reads."""
    is_kept: bool = False
    """Its forward finds attention's results, which pass 1 kept."""

    @property
    def in_forward(self) -> Amounts:
        """Without what the forward need not compute."""
        return self._replace(pairs=0, tiles=0) if self.is_kept else self


DUMMY = Amounts(1, 1, 1, 1, 0)
"""A micro-batch that only takes part in collectives."""


class PassAmounts(NamedTuple):
    """The micro-batches of one call of a schedule, in order."""

    micro_batches: tuple[Amounts, ...]
    is_training: bool


def shared_passes(plan: ExecutionPlan) -> list[PassAmounts]:
    """Pass 1 and pass 2 of every wave of a plan; empty ones are left out, as the runtime does."""
    amounts = [micro_batch_amounts(micro_batch) for micro_batch in plan.micro_batches]
    passes = []
    for wave in plan.waves:
        for order, is_training in ((wave.pass1, False), (wave.pass2, True)):
            if order:
                kept = plan.kept_attention if is_training else ()
                run = tuple(amounts[m]._replace(is_kept=True) if m in kept else amounts[m] for m in order)
                passes.append(PassAmounts(run, is_training))
    return passes


def micro_batch_amounts(micro_batch: MicroBatch) -> Amounts:
    """Amounts of a planned micro-batch."""
    last_S, path = micro_batch.last_S, micro_batch.path_len
    local = last_S[path:]
    # A new node begins where the end of the visibility grows or, further down a path, shrinks: a triangle and a
    # rectangle for each; path keys are one rectangle for every run of equal ends.
    nodes = 1 + int((np.diff(local) != 0).sum()) if len(local) else 0
    runs = len(np.unique(last_S[:path])) if path else 0
    return Amounts(
        tokens=micro_batch.num_tokens,
        pairs=micro_batch.visible_pairs,
        rows=max(1, len(micro_batch.rows_R)),
        tiles=max(1, nodes + runs),
        path_tokens=path,
    )


def unshared_pass(
    samples: SampleBatch, parts: Sequence[IntArray], *, is_training: bool, rows: IntArray | None = None
) -> PassAmounts:
    """Packed sequences: every token is computed and projected to the vocabulary.

    Args:
        parts: samples of every micro-batch, as positions in ``rows``.
        rows: samples of this rank; None: all.
    """
    seqlens = samples.seqlens_S if rows is None else samples.seqlens_S[rows]
    found = []
    for part in parts:
        lengths = seqlens[part]
        tokens = int(lengths.sum())
        found.append(Amounts(tokens, int((lengths * (lengths + 1) // 2).sum()), tokens, len(part), 0))
    return PassAmounts(tuple(found), is_training)


def padded_to(run: PassAmounts, num_micro_batches: int) -> PassAmounts:
    """With dummy micro-batches at the end."""
    missing = num_micro_batches - len(run.micro_batches)
    return PassAmounts(run.micro_batches + (DUMMY,) * missing, run.is_training)
