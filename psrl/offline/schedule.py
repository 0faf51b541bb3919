"""Which samples every step trains on, and which rank gets which: functions of the options alone, so that a resumed
training continues with the same rows. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from psrl.data import ReplaySample, padding_of
from psrl.placement.cells import Cells, RowKey
from psrl.placement.orchestrator import place_rows
from psrl.placement.segments import segments_from_tokens
from psrl.placement.upstream import upstream_order


@dataclass(frozen=True, slots=True)
class StepRows:
    """One optimizer step."""

    step: int
    """From 1."""
    epoch: int
    """From 1."""
    ranks: tuple[tuple[ReplaySample, ...], ...]
    """Samples of every data-parallel rank, equally many; padding included."""
    num_samples: int
    """Without padding."""
    imbalance: float
    """Largest effective workload of a rank over the mean."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Steps whose old log-probs come from the same weights."""

    steps: tuple[StepRows, ...]


def epoch_batches(samples: Sequence[ReplaySample], batch: int, seed: int, epoch: int) -> list[list[ReplaySample]]:
    """Every sample once, in batches of ``batch``, the last of which may be smaller.

    Sessions are shuffled, by seed and epoch; the samples of one stay together and in order.
    """
    sessions: dict[str, list[ReplaySample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session or sample.where, []).append(sample)
    shuffled = list(sessions.values())
    np.random.default_rng([seed, epoch]).shuffle(shuffled)  # pyright: ignore[reportArgumentType]
    ordered = [sample for session in shuffled for sample in session]
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]


def num_steps(num_samples: int, rows_per_step: int, batch: int, epochs: int, limit: int | None = None) -> int:
    """Optimizer steps of a training. A batch is cut into steps of its own; ``limit`` is rounded up to whole batches."""
    full, rest = divmod(num_samples, batch)
    sizes = ([batch // rows_per_step] * full + [-(-rest // rows_per_step)] * bool(rest)) * epochs
    total = 0
    for size in sizes:
        if limit is not None and total >= limit:
            break
        total += size
    return total


def batches(
    samples: Sequence[ReplaySample],
    *,
    batch: int,
    rows_per_step: int,
    epochs: int,
    seed: int,
    num_ranks: int,
    first_step: int = 1,
    last_step: int | None = None,
) -> Iterator[BatchRows]:
    """Every sample once an epoch, sessions whole; the last batch of an epoch may be smaller.

    Args:
        first_step: begin with the batch that begins with this step.
        last_step: end with the batch that holds this step. None: with the last epoch.
    """
    step = 0
    for epoch in range(epochs):
        for rows in epoch_batches(samples, batch, seed, epoch):
            parts = [rows[start : start + rows_per_step] for start in range(0, len(rows), rows_per_step)]
            numbers = range(step + 1, step + 1 + len(parts))
            step += len(parts)
            if step < first_step:
                continue
            if last_step is not None and numbers.start > last_step:
                return
            yield BatchRows(
                tuple(_place(number, epoch + 1, part, num_ranks) for number, part in zip(numbers, parts, strict=True))
            )


def _place(step: int, epoch: int, rows: Sequence[ReplaySample], num_ranks: int) -> StepRows:
    """Sessions stay on one rank where the equal number of rows allows it, and no rank is busier than with the order
    that veRL's trainer would take."""
    padded = [*rows, *(padding_of(rows[0]) for _ in range(-len(rows) % num_ranks))]
    keys = [RowKey(s.uid or s.session or s.where, s.session or s.where, s.index) for s in padded]
    is_padding_S = np.arange(len(padded)) >= len(rows)
    cells = Cells.of(len(padded), num_ranks, len(padded))
    placed = place_rows(
        keys,
        is_padding_S,
        segments_from_tokens([s.input_ids_N for s in padded], [s.position_ids_N for s in padded]),
        cells,
        grouping="tokens",
        split_groups=True,
        upstream_S=upstream_order(np.array([s.num_tokens for s in padded], dtype=np.int64), num_ranks),
    )
    grid = cells.split(placed.order_S)[:, 0]
    ranks = tuple(tuple(padded[row] for row in rank) for rank in grid.tolist())
    return StepRows(step, epoch, ranks, len(rows), placed.imbalance)
