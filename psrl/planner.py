"""The token-wise execution planner: from samples to an ExecutionPlan, before any tensor moves.

1. A token whose subtree has more than ``max_tokens`` tokens is *spine*; the rest falls into complete *light* subtrees.
2. Spine tokens, in preorder, are cut into consecutive segments of near-equal cost. All ancestors of a segment that lie
   outside it are on the root path of its first token, so every cut gives a valid micro-batch.
3. Light subtrees are packed into leaf micro-batches; the subtrees of one hang off one root path.
4. Pass 2 visits descendants before ancestors: for each spine segment from last to first, the leaf micro-batches that
   hang off it, then the segment itself. K/V and gradient accumulators die as early as that order allows.
5. If the cache would exceed its budget, consecutive segments form waves, each with its own two passes. A segment's
   pass 2 waits for the last wave that descends from it, so nothing is computed more often. If that is not enough,
   segments are cut at forks, so that only one root path stays cached between waves.
6. If that is still not enough, there are two more tiers, and the plan takes the cheaper one: single layers of blocks
   move to host memory and back (``offload.py``), or prefixes are shared down to some depth only and computed again for
   each micro-batch below it.

Shape legend: U unique tokens, T local tokens, P path tokens, E edges, R logit rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from psrl.assembly import Pieces, assemble
from psrl.cost import CostFunction, KVFootprint, ModelShape, Work
from psrl.edges import collect_edges
from psrl.errors import ConfigError, MemoryBudgetError
from psrl.kept_attention import keep_attention
from psrl.micro_batching import tries_below, with_labels
from psrl.offload import schedule_transfers
from psrl.packing import token_costs
from psrl.systems import PSRL, System
from psrl.tiers import HostTier, TierSchedule
from psrl.tree import PrefixTree, build_tree
from psrl.types import Edges, ExecutionPlan, MicroBatch, PlanStats, SampleBatch, Wave
from psrl.waves import WaveOrder, plan_waves, sample_of


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
    recompute: bool = False,
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
        recompute: whether prefixes that the budget cannot hold may be computed for each micro-batch that needs them.

    Raises:
        ConfigError: ``max_tokens`` below 1, or a host tier or recompute under another system.
        InputError: an empty sample, a first token that is a target, or ids out of range.
        MemoryBudgetError: the budget cannot hold the cache of one spine segment and its root path; with a host tier,
            one layer of it, or the host cannot hold the rest; with recompute, what a sample has beyond ``max_tokens``.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    for is_used, name in ((host is not None, "the host tier (psrl.kv_host_bytes)"), (recompute, "psrl.kv_recompute")):
        if is_used and system is not PSRL:
            raise ConfigError(f"{name} is psrl's, not that of system {system.name}")
    draft = _Draft(batch, tree or build_tree(batch), max_tokens, shape, footprint, forward_only, cost, system)
    plan = draft.on_device()
    if isinstance(plan, ExecutionPlan):
        return plan
    hosted = draft.with_host(host) if host is not None else plan
    again = draft.with_recompute() if recompute else None
    if again is None:
        if isinstance(hosted, MemoryBudgetError):
            raise hosted
        return hosted
    if host is None or isinstance(hosted, MemoryBudgetError):
        return again
    per_byte = host.flops_per_byte
    return min((hosted, again), key=lambda each: each.stats.flops_shared + per_byte * each.stats.kv_bytes_moved)


@dataclass
class _Draft:
    """Samples, their tree and its division into micro-batches: all of a plan but for the order. As ``build_plan``."""

    batch: SampleBatch
    tree: PrefixTree
    max_tokens: int
    shape: ModelShape
    footprint: KVFootprint
    forward_only: bool
    cost: CostFunction | None
    system: System
    recomputed_tokens: int = 0
    """Tokens of ``tree`` beyond the distinct ones of the samples."""

    def __post_init__(self) -> None:
        batch, tree = self.batch, self.tree
        self.edges = collect_edges(batch, tree)
        self.num_rows_U = _rows_per_token(self.edges, tree.num_tokens)
        self.cost_U = token_costs(tree, self.num_rows_U, self.cost or self.shape.cost)
        divide = (self.system if batch.num_samples else PSRL).divide
        self.division = divide(batch, tree, self.cost_U, self.max_tokens)

    def on_device(self) -> ExecutionPlan | MemoryBudgetError:
        """The plan within the budget, in waves if need be; the error where a spine segment and its root path exceed it.

        Segments are cut at forks only where nothing else fits.
        """
        for at_forks in (False, True):
            pieces = self._pieces(at_forks=at_forks)
            order = self._order(pieces, fits=True)
            if isinstance(order, WaveOrder):
                return self._plan(pieces, order)
        return order

    def with_host(self, host: HostTier) -> ExecutionPlan | MemoryBudgetError:
        """The plan as close to the budget as waves come, with what exceeds it in host memory; the error where one layer
        of a segment exceeds the budget, or the copies that of the host."""
        pieces = self._pieces(at_forks=not self.forward_only)
        order = self._order(pieces, fits=False)
        assert isinstance(order, WaveOrder)
        tiers = schedule_transfers(pieces.micro_batches, pieces.blocks, order.waves, self.footprint, host)
        if isinstance(tiers, MemoryBudgetError):
            if tiers.micro_batch is not None:
                tiers.sample = sample_of(self.batch, self.tree, pieces, tiers.micro_batch)
            return tiers
        return self._plan(pieces, order._replace(peak_bytes=tiers.device_bytes_peak), tiers)

    def with_recompute(self) -> ExecutionPlan | None:
        """The plan that shares most of what the budget can hold. None where a sample needs more on its own.

        Prefixes are cached down to some depth, at first what the budget holds of one root path. Below it, samples are
        packed into tries of at most ``max_tokens`` tokens, and what several tries have in common each computes.
        """
        budget, longest = self.footprint.budget_bytes, int(self.tree.depth_U.max(initial=-1)) + 1
        assert budget is not None  # else nothing exceeds it
        most = budget // self.footprint.bytes_per_token(self.forward_only) * self.footprint.num_shards
        depths = [most * quarters // 4 for quarters in (4, 3, 2, 1, 0)]
        shallow = [depth for depth in depths if depth < longest]  # from the longest on it is the same tree again
        for labels_N in tries_below(self.batch, self.tree, self.max_tokens, shallow):
            batch = with_labels(self.batch, labels_N)
            tree = build_tree(batch)
            copies = tree.num_tokens - self.tree.num_tokens
            plan = dataclasses.replace(self, batch=batch, tree=tree, recomputed_tokens=copies).on_device()
            if isinstance(plan, ExecutionPlan):
                return plan
        return None

    def _pieces(self, *, at_forks: bool) -> Pieces:
        return assemble(
            self.tree,
            self.edges,
            self.division.cut(at_forks),
            self.division.bins,
            self.cost_U,
            executions=1 if self.forward_only else 2,
            cache=self.system.cache,
        )

    def _order(self, pieces: Pieces, *, fits: bool) -> WaveOrder | MemoryBudgetError:
        cache = self.system.cache
        return plan_waves(self.batch, self.tree, pieces, self.footprint, self.forward_only, cache, fits=fits)

    def _plan(self, pieces: Pieces, order: WaveOrder, tiers: TierSchedule | None = None) -> ExecutionPlan:
        waves = order.waves
        largest = max((mb.num_tokens for mb in pieces.micro_batches), default=0)  # psrl's own never exceed max_tokens
        plan = ExecutionPlan(
            forward_only=self.forward_only,
            max_tokens=max(self.max_tokens, largest),
            token_ids_U=self.tree.token_ids_U,
            position_ids_U=self.tree.position_ids_U,
            index_N=self.tree.index_N,
            edges=self.edges,
            micro_batches=pieces.micro_batches if self.forward_only else _with_completions(pieces, self.edges, waves),
            blocks=pieces.blocks,
            waves=waves,
            stats=self._stats(pieces, order, tiers),
            cache=self.system.cache,
            tiers=tiers,
        )
        return keep_attention(plan, self.shape, self.footprint)

    def _stats(self, pieces: Pieces, order: WaveOrder, tiers: TierSchedule | None) -> PlanStats:
        tree, shape, spine_U, num_rows_U = self.tree, self.shape, self.division.spine_U, self.num_rows_U
        pairs_U, seqlens = tree.depth_U + 1, self.batch.seqlens_S
        num_tokens = self.batch.num_tokens
        every = Work(num_tokens, int((seqlens * (seqlens + 1) // 2).sum()), num_tokens)
        path, spine_path = (
            sum(mb.path_len for mb in pieces.micro_batches if mb.is_spine or not only_spine)
            for only_spine in (False, True)
        )
        unique = Work(tree.num_tokens, int(pairs_U.sum()), int(num_rows_U.sum()), path)
        spine = Work(int(spine_U.sum()), int(pairs_U[spine_U].sum()), int(num_rows_U[spine_U].sum()), spine_path)
        flops_unshared, flops_shared = shape.forward_flops(every), shape.forward_flops(unique)
        if not self.forward_only:
            flops_unshared += shape.backward_flops(every)
            flops_shared += shape.backward_flops(unique) + shape.forward_flops(spine)
        return PlanStats(
            num_samples=self.batch.num_samples,
            num_tokens=num_tokens,
            unique_tokens=tree.num_tokens,
            spine_tokens=spine.tokens,
            num_micro_batches=len(pieces.micro_batches),
            num_waves=len(order.waves),
            kv_bytes_peak=order.peak_bytes,
            flops_unshared=flops_unshared,
            flops_shared=flops_shared,
            kv_host_bytes_peak=tiers.host_pool_bytes if tiers else 0,
            kv_bytes_to_host=tiers.bytes_to_host if tiers else 0,
            kv_bytes_to_device=tiers.bytes_to_device if tiers else 0,
            recomputed_tokens=self.recomputed_tokens,
        )


def _rows_per_token(edges: Edges, num_unique: int) -> np.ndarray:
    """[U] logit rows of every token: one per temperature in which it predicts something."""
    if not edges.num_edges:
        return np.zeros(num_unique, dtype=np.int64)
    new_row = np.ones(edges.num_edges, dtype=bool)  # edges are ordered by (source, temperature, label)
    new_row[1:] = (np.diff(edges.source_E) != 0) | (np.diff(edges.temperature_E) != 0)
    return np.bincount(edges.source_E[new_row], minlength=num_unique)


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
