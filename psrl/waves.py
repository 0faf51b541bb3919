"""The order of execution: waves of two passes within the cache budget, or one forward pass."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from psrl.assembly import Pieces
from psrl.blocks import BlockLedger, wave_peak
from psrl.cost import KVFootprint
from psrl.errors import MemoryBudgetError
from psrl.tree import PrefixTree
from psrl.types import CachePolicy, SampleBatch, Wave


class WaveOrder(NamedTuple):
    """Waves, and the peak of the cache in bytes."""

    waves: tuple[Wave, ...]
    peak_bytes: int


def plan_waves(
    batch: SampleBatch,
    tree: PrefixTree,
    pieces: Pieces,
    footprint: KVFootprint,
    forward_only: bool,
    cache: CachePolicy,
    *,
    fits: bool,
) -> WaveOrder | MemoryBudgetError:
    """Order the micro-batches within the cache budget.

    Args:
        fits: the budget has to be kept; otherwise, come as close to it as waves can.

    Returns:
        the order, or where the budget has to be kept and cannot be, the error that says by whom.
    """
    budget = footprint.budget_bytes
    ledger = BlockLedger(pieces.blocks, pieces.micro_batches, forward_only, cache)
    whole = _forward_wave(pieces) if forward_only else _training_wave(pieces, 0, pieces.num_segments - 1, set())
    peak = wave_peak(ledger.copy(), whole, footprint)
    if budget is None or peak <= budget:
        return WaveOrder((whole,), peak)
    if forward_only:
        return _budget_error(batch, tree, pieces, 0, peak, budget) if fits else WaveOrder((whole,), peak)

    waves: list[Wave] = []
    done: set[int] = set()
    start, peak = 0, 0
    while start < pieces.num_segments:
        chosen: tuple[int, Wave, BlockLedger, int] | None = None
        needed = 0
        for stop in range(start, pieces.num_segments):
            wave, after = _training_wave(pieces, start, stop, done), ledger.copy()
            needed = wave_peak(after, wave, footprint)
            if needed > budget and (fits or (chosen is not None and chosen[1].pass2)):
                break  # a wave that exceeds the budget anyway is as long as it takes to finish a segment
            chosen = (stop, wave, after, needed)
        if chosen is None:
            return _budget_error(batch, tree, pieces, start, needed, budget)
        stop, wave, ledger, needed = chosen
        waves.append(wave)
        done.update(wave.pass2)
        start, peak = stop + 1, max(peak, needed)
    return WaveOrder(tuple(waves), peak)


def _leaves_by_segment(pieces: Pieces) -> dict[int, list[int]]:
    """Leaf micro-batches by the segment that holds the end of their path; -1: no path."""
    leaves: defaultdict[int, list[int]] = defaultdict(list)
    for index, tip in enumerate(pieces.tip_segments):
        if not pieces.micro_batches[index].is_spine:
            leaves[tip].append(index)
    return leaves


def _forward_wave(pieces: Pieces) -> Wave:
    """Every segment followed by the leaf micro-batches that hang off it: ancestors first, K/V freed early."""
    leaves = _leaves_by_segment(pieces)
    order = [m for segment in range(pieces.num_segments) for m in (segment, *leaves[segment])]
    return Wave(tuple(order + leaves[-1]), ())


def _training_wave(pieces: Pieces, start: int, stop: int, done: set[int]) -> Wave:
    """Pass 1 over segments ``start..stop``; pass 2 over every segment not ``done`` that no later one descends from."""
    leaves = _leaves_by_segment(pieces)
    pass2: list[int] = []
    for segment in range(stop, -1, -1):
        if segment not in done and pieces.last_descendant[segment] <= stop:
            pass2 += [*leaves[segment], segment]
    if stop == pieces.num_segments - 1:
        pass2 += leaves[-1]
    return Wave(tuple(range(start, stop + 1)), tuple(pass2))


def _budget_error(
    batch: SampleBatch, tree: PrefixTree, pieces: Pieces, segment: int, needed: int, budget: int
) -> MemoryBudgetError:
    sample = sample_of(batch, tree, pieces, segment)
    error = MemoryBudgetError(
        f"sample {sample} ({batch.seqlens_S[sample]:,} tokens) needs {needed:,} bytes of KV cache at once, but "
        f"psrl.kv_cache_bytes allows {budget:,}: raise psrl.kv_cache_bytes, or raise psrl.max_tokens so that fewer "
        "tokens are cached"
    )
    error.sample = sample
    return error


def sample_of(batch: SampleBatch, tree: PrefixTree, pieces: Pieces, micro_batch: int) -> int:
    """A sample that holds the micro-batch's last token."""
    token = int(pieces.micro_batches[micro_batch].tokens_T[-1])
    position = int(np.flatnonzero(tree.index_N == token)[0])
    return int(np.searchsorted(batch.cu_seqlens, position, side="right")) - 1
