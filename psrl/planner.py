"""The token-wise execution planner: from samples to an ExecutionPlan, before any tensor moves.

1. A token whose subtree has more than ``max_tokens`` tokens is *spine*; the rest falls into complete *light* subtrees.
2. Spine tokens, in preorder, are cut into consecutive segments of near-equal cost. All ancestors of a segment that lie
   outside it are on the root path of its first token, so every cut gives a valid micro-batch.
3. Light subtrees are packed into leaf micro-batches; the subtrees of one hang off one root path.
4. Pass 2 visits descendants before ancestors: for each spine segment from last to first, the leaf micro-batches that
   hang off it, then the segment itself. K/V and gradient accumulators die as early as that order allows.
5. If the cache would exceed its budget, consecutive segments form waves, each with its own two passes. A segment's
   pass 2 waits for the last wave that descends from it, so nothing is computed more often. If that is not enough,
   segments are cut at forks, so that only one root path stays cached between waves. If that is still not enough, and
   there is a host tier, single layers of blocks move to host memory and back (``offload.py``).

Shape legend: U unique tokens, T local tokens, P path tokens, E edges, R logit rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict

import numpy as np

from psrl.assembly import Pieces, assemble
from psrl.blocks import BlockLedger, wave_peak
from psrl.cost import CostFunction, KVFootprint, ModelShape, Work
from psrl.edges import collect_edges
from psrl.errors import ConfigError, MemoryBudgetError
from psrl.offload import schedule_transfers
from psrl.packing import token_costs
from psrl.systems import PSRL, System
from psrl.tiers import HostTier, TierSchedule
from psrl.tree import PrefixTree, build_tree
from psrl.types import CachePolicy, Edges, ExecutionPlan, MicroBatch, PlanStats, SampleBatch, Wave


def build_plan(
    batch: SampleBatch,
    *,
    max_tokens: int,
    shape: ModelShape,
    footprint: KVFootprint,
    forward_only: bool = False,
    cost: CostFunction | None = None,
    tree: PrefixTree | None = None,
    system: System = PSRL,
    host: HostTier | None = None,
) -> ExecutionPlan:
    """Plan one mini-batch of one rank.

    Args:
        max_tokens: most tokens that a micro-batch computes.
        shape: model shape, for FLOPs.
        footprint: cache bytes per token, and the budget.
        forward_only: plan a single pass (old log-prob, reference) instead of the two passes of an update.
        cost: forward cost of a micro-batch; default: FLOPs of ``shape``.
        tree: of the batch, where several plans are made of it; None: built here.
        system: another for comparison; then ``batch`` is what ``system.prepare`` made.
        host: memory for what the budget cannot hold; None: there is none.

    Raises:
        ConfigError: ``max_tokens`` below 1, or a host tier under another system.
        InputError: an empty sample, a first token that is a target, or ids out of range.
        MemoryBudgetError: the budget cannot hold the cache of one spine segment and its root path. With a host tier:
            one layer of it, or the host cannot hold the rest.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    if host is not None and system is not PSRL:
        raise ConfigError(f"the host tier (psrl.kv_host_bytes) is psrl's, not that of system {system.name}")
    tree = tree or build_tree(batch)
    edges = collect_edges(batch, tree)
    num_rows_U = _rows_per_token(edges, tree.num_tokens)
    cost_U = token_costs(tree, num_rows_U, cost or shape.cost)
    division = (system if batch.num_samples else PSRL).divide(batch, tree, cost_U, max_tokens)

    def arrange(*, at_forks: bool, fits: bool = True) -> tuple[Pieces, tuple[Wave, ...], int]:
        segments, executions = division.cut(at_forks), 1 if forward_only else 2
        pieces = assemble(tree, edges, segments, division.bins, cost_U, executions=executions, cache=system.cache)
        return pieces, *_plan_waves(batch, tree, pieces, footprint, forward_only, system.cache, fits=fits)

    arranged, tiers = None, None
    with contextlib.suppress(MemoryBudgetError):
        arranged = arrange(at_forks=False)
    try:
        pieces, waves, peak = arranged or arrange(at_forks=True)
    except MemoryBudgetError:
        if host is None:
            raise
        pieces, waves, _ = arrange(at_forks=not forward_only, fits=False)
        tiers = _transfers(batch, tree, pieces, waves, footprint, host)
        peak = tiers.device_bytes_peak
    return ExecutionPlan(
        forward_only=forward_only,
        max_tokens=max([max_tokens, *(mb.num_tokens for mb in pieces.micro_batches)]),  # psrl's own never exceed it
        token_ids_U=tree.token_ids_U,
        position_ids_U=tree.position_ids_U,
        edges=edges,
        micro_batches=pieces.micro_batches if forward_only else _with_completions(pieces, edges, waves),
        blocks=pieces.blocks,
        waves=waves,
        stats=_with_transfers(
            _stats(batch, tree, division.spine_U, num_rows_U, pieces, waves, peak, shape, forward_only), tiers
        ),
        cache=system.cache,
        tiers=tiers,
    )


def _rows_per_token(edges: Edges, num_unique: int) -> np.ndarray:
    """[U] logit rows of every token: one per temperature in which it predicts something."""
    if not edges.num_edges:
        return np.zeros(num_unique, dtype=np.int64)
    new_row = np.ones(edges.num_edges, dtype=bool)  # edges are ordered by (source, temperature, label)
    new_row[1:] = (np.diff(edges.source_E) != 0) | (np.diff(edges.temperature_E) != 0)
    return np.bincount(edges.source_E[new_row], minlength=num_unique)


# ---------------------------------------------------------------------------------------------- order and waves
def _plan_waves(
    batch: SampleBatch,
    tree: PrefixTree,
    pieces: Pieces,
    footprint: KVFootprint,
    forward_only: bool,
    cache: CachePolicy,
    *,
    fits: bool,
) -> tuple[tuple[Wave, ...], int]:
    """Order the micro-batches within the cache budget. Returns the waves and the peak in bytes.

    Args:
        fits: raise where the budget cannot be kept; otherwise, come as close to it as waves can.
    """
    budget = footprint.budget_bytes
    ledger = BlockLedger(pieces.blocks, pieces.micro_batches, forward_only, cache)
    whole = _forward_wave(pieces) if forward_only else _training_wave(pieces, 0, pieces.num_segments - 1, set())
    peak = wave_peak(ledger.copy(), whole, footprint)
    if budget is None or peak <= budget:
        return (whole,), peak
    if forward_only:
        if fits:
            raise _budget_error(batch, tree, pieces, 0, peak, budget)
        return (whole,), peak

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
                break  # what does not fit anyway at least ends something
            chosen = (stop, wave, after, needed)
        if chosen is None:
            raise _budget_error(batch, tree, pieces, start, needed, budget)
        stop, wave, ledger, needed = chosen
        waves.append(wave)
        done.update(wave.pass2)
        start, peak = stop + 1, max(peak, needed)
    return tuple(waves), peak


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
    sample = _sample_of(batch, tree, pieces, segment)
    error = MemoryBudgetError(
        f"sample {sample} ({batch.seqlens_S[sample]:,} tokens) needs {needed:,} bytes of KV cache at once, but "
        f"psrl.kv_cache_bytes allows {budget:,}: raise psrl.kv_cache_bytes, or raise psrl.max_tokens so that fewer "
        "tokens are cached"
    )
    error.sample = sample
    return error


def _sample_of(batch: SampleBatch, tree: PrefixTree, pieces: Pieces, micro_batch: int) -> int:
    """A sample that holds the micro-batch's last token."""
    token = int(pieces.micro_batches[micro_batch].tokens_T[-1])
    position = int(np.flatnonzero(tree.index_N == token)[0])
    return int(np.searchsorted(batch.cu_seqlens, position, side="right")) - 1


def _transfers(
    batch: SampleBatch,
    tree: PrefixTree,
    pieces: Pieces,
    waves: tuple[Wave, ...],
    footprint: KVFootprint,
    host: HostTier,
) -> TierSchedule:
    """``schedule_transfers``, whose errors name a sample."""
    try:
        return schedule_transfers(pieces.micro_batches, pieces.blocks, waves, footprint, host)
    except MemoryBudgetError as error:
        if error.micro_batch is not None:
            error.sample = _sample_of(batch, tree, pieces, error.micro_batch)
        raise


def _with_transfers(stats: PlanStats, tiers: TierSchedule | None) -> PlanStats:
    if tiers is None:
        return stats
    return dataclasses.replace(
        stats,
        kv_host_bytes_peak=tiers.host_pool_bytes,
        kv_bytes_to_host=tiers.bytes_to_host,
        kv_bytes_to_device=tiers.bytes_to_device,
    )


def _with_completions(pieces: Pieces, edges: Edges, waves: tuple[Wave, ...]) -> tuple[MicroBatch, ...]:
    """Assign every sample with a target to the first micro-batch, in pass-2 order, that holds one of its edges."""
    micro_batches = pieces.micro_batches
    order = np.asarray([m for wave in waves for m in wave.pass2], dtype=np.int64)
    rank = np.empty(len(micro_batches), dtype=np.int64)
    rank[order] = np.arange(len(order))
    with_targets = np.flatnonzero(np.diff(edges.cu_targets))
    completes: list[list[int]] = [[] for _ in micro_batches]
    if len(with_targets):
        rank_M = rank[pieces.owner_U[edges.source_E[edges.target_edges_M]]]
        first = np.minimum.reduceat(rank_M, edges.cu_targets[:-1][with_targets])
        for sample, position in zip(with_targets.tolist(), first.tolist(), strict=True):
            completes[order[position]].append(sample)
    return tuple(
        dataclasses.replace(mb, completes=np.asarray(samples, dtype=np.int64))
        for mb, samples in zip(micro_batches, completes, strict=True)
    )


def _stats(
    batch: SampleBatch,
    tree: PrefixTree,
    spine_U: np.ndarray,
    num_rows_U: np.ndarray,
    pieces: Pieces,
    waves: tuple[Wave, ...],
    peak: int,
    shape: ModelShape,
    forward_only: bool,
) -> PlanStats:
    pairs_U = tree.depth_U + 1
    seqlens = batch.seqlens_S
    every = Work(batch.num_tokens, int((seqlens * (seqlens + 1) // 2).sum()), batch.num_tokens)
    path, spine_path = (
        sum(mb.path_len for mb in pieces.micro_batches if mb.is_spine or not only_spine) for only_spine in (False, True)
    )
    unique = Work(tree.num_tokens, int(pairs_U.sum()), int(num_rows_U.sum()), path)
    spine = Work(int(spine_U.sum()), int(pairs_U[spine_U].sum()), int(num_rows_U[spine_U].sum()), spine_path)
    flops_unshared, flops_shared = shape.forward_flops(every), shape.forward_flops(unique)
    if not forward_only:
        flops_unshared += shape.backward_flops(every)
        flops_shared += shape.backward_flops(unique) + shape.forward_flops(spine)
    return PlanStats(
        num_samples=batch.num_samples,
        num_tokens=batch.num_tokens,
        unique_tokens=tree.num_tokens,
        spine_tokens=spine.tokens,
        num_micro_batches=len(pieces.micro_batches),
        num_waves=len(waves),
        kv_bytes_peak=peak,
        flops_unshared=flops_unshared,
        flops_shared=flops_shared,
    )
