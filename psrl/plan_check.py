"""Invariant checker: does a plan compute exactly what its samples ask for?

It trusts nothing of the planner. It follows the plan as the runtime would and compares what every token sees with the
samples themselves. Quadratic in depth, for tests and debugging.

Shape legend: N tokens of all samples, U unique tokens, T local tokens, P path tokens, M targets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from psrl.cost import KVFootprint
from psrl.errors import PlanError
from psrl.kept_attention import attention_bytes
from psrl.tier_check import check_transfers
from psrl.tiers import HostTier
from psrl.types import ExecutionPlan, IntArray, MicroBatch, SampleBatch


def check_plan(
    plan: ExecutionPlan, batch: SampleBatch, footprint: KVFootprint | None = None, host: HostTier | None = None
) -> None:
    """Verify ``plan`` against its samples.

    Args:
        footprint, host: those that the plan was made with; without, bytes are not checked.

    Raises:
        PlanError: the first invariant that does not hold, by name.
    """
    _check_micro_batches(plan)
    visible = _visible_tokens(plan)
    _check_tokens(plan, batch, visible)
    _check_targets(plan, batch, visible)
    _check_order(plan)
    if not plan.forward_only:
        _check_completions(plan, batch)
    peak = _replay_cache(plan, footprint or KVFootprint(1, 1))
    if footprint is not None:
        _check_kept_attention(plan, footprint)
    if footprint is not None and plan.tiers is not None:
        if host is None:
            raise PlanError("transfers without a host tier")
        check_transfers(plan, footprint, host)
    elif footprint is not None:
        _require(peak == plan.stats.kv_bytes_peak, f"predicted peak {plan.stats.kv_bytes_peak}, replayed {peak}")
        _require(footprint.budget_bytes is None or peak <= footprint.budget_bytes, f"peak {peak} exceeds the budget")
        moved = (plan.stats.kv_host_bytes_peak, plan.stats.kv_bytes_to_host, plan.stats.kv_bytes_to_device)
        _require(moved == (0, 0, 0), "bytes of a host tier that is not used")


def _check_kept_attention(plan: ExecutionPlan, footprint: KVFootprint) -> None:
    """Of spine micro-batches, within the budget; nothing unless one pass 1 makes it and one pass 2 reads it."""
    kept, stats = plan.kept_attention, plan.stats
    size = attention_bytes(plan, footprint, kept)
    _require(stats.attention_bytes == size, f"predicted {stats.attention_bytes} bytes of kept attention, not {size}")
    if kept:
        _require(not plan.forward_only and len(plan.waves) == 1, "attention is kept in a plan that does not read it")
        _require(all(plan.micro_batches[m].is_spine for m in kept), "attention of a leaf is kept, which runs once")
        budget = footprint.budget_bytes
        _require(budget is None or stats.kv_bytes_peak + size <= budget, f"kept attention exceeds the budget {budget}")


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _check_micro_batches(plan: ExecutionPlan) -> None:
    counts = np.zeros(len(plan.token_ids_U), dtype=np.int64)
    edge_counts = np.zeros(plan.edges.num_edges, dtype=np.int64)
    for index, mb in enumerate(plan.micro_batches):
        _require(mb.index == index, f"micro-batch {index} calls itself {mb.index}")
        _require(0 < mb.num_tokens <= plan.max_tokens, f"micro-batch {index} has {mb.num_tokens} tokens")
        np.add.at(counts, mb.tokens_T, 1)
        np.add.at(edge_counts, mb.edges_E, 1)
        own = [t for b in mb.own_blocks for t in range(*plan.blocks[b].span)]
        is_stored = mb.is_spine or plan.cache.stores_leaves
        _require(own == (mb.tokens_T.tolist() if is_stored else []), f"own blocks of micro-batch {index}")
        path_len = sum(plan.blocks[b].num_tokens for b in mb.path_blocks)
        _require(len(mb.first_S) == len(mb.last_S) == path_len + mb.num_tokens, f"keys of micro-batch {index}")
        source = plan.edges.source_E[mb.edges_E]
        _require((mb.tokens_T[mb.rows_R[mb.edge_rows_E]] == source).all(), f"rows of micro-batch {index}")
        same = mb.row_temperature_R[mb.edge_rows_E] == plan.edges.temperature_E[mb.edges_E]
        _require(same.all(), f"row temperatures of micro-batch {index}")
        rows = list(zip(mb.rows_R.tolist(), mb.row_temperature_R.tolist(), strict=True))
        _require(len(set(rows)) == len(rows), f"micro-batch {index} has a logit row twice")
    _require((counts == 1).all(), "a unique token is not computed exactly once")
    _require((edge_counts == 1).all(), "an edge is not computed exactly once")
    edges = plan.edges
    triples = zip(edges.source_E.tolist(), edges.label_E.tolist(), edges.temperature_E.tolist(), strict=True)
    _require(max(Counter(triples).values(), default=1) == 1, "an edge exists twice")


def _visible_tokens(plan: ExecutionPlan) -> dict[int, IntArray]:
    """For every unique token, the unique tokens that its query sees, in key order."""
    visible: dict[int, IntArray] = {}
    for mb in plan.micro_batches:
        path = [np.arange(*plan.blocks[b].span) for b in mb.path_blocks]
        keys = np.concatenate([*path, mb.tokens_T])
        for query, token in enumerate(mb.tokens_T.tolist()):
            visible[token] = keys[(mb.first_S <= query) & (query < mb.last_S)]
    return visible


def _prefix_ids(batch: SampleBatch) -> list[list[int]]:
    """Per sample token, an id of its whole prefix (itself included): a trie walked token by token."""
    trie: dict[tuple[int, ...], int] = {}
    ids: list[list[int]] = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        node = -1
        row: list[int] = []
        for t in range(start, end):
            extra = () if batch.extra_inputs_NK is None else tuple(batch.extra_inputs_NK[t].tolist())
            key = (node, int(batch.token_ids_N[t]), int(batch.position_ids_N[t]), *extra)
            node = trie.setdefault(key, len(trie))
            row.append(node)
        ids.append(row)
    return ids


def _check_tokens(plan: ExecutionPlan, batch: SampleBatch, visible: dict[int, IntArray]) -> None:
    """As many unique tokens as distinct prefixes and copies, and every token sees itself last."""
    distinct, copies = len({x for row in _prefix_ids(batch) for x in row}), plan.stats.recomputed_tokens
    told = f"{len(plan.token_ids_U)} unique tokens for {distinct} prefixes and {copies} copies"
    _require(copies >= 0 and len(plan.token_ids_U) == distinct + copies, told)
    _require(len(plan.index_N) == batch.num_tokens, "number of samples' tokens")
    for sample, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        seen = visible[int(plan.index_N[end - 1])]
        same = len(seen) == end - start and (plan.index_N[start:end] == seen).all()
        _require(same, f"the last token of sample {sample} does not see the sample")
    for token, seen in visible.items():
        _require(len(seen) > 0 and seen[-1] == token, f"token {token} does not see itself last")


def _check_targets(plan: ExecutionPlan, batch: SampleBatch, visible: dict[int, IntArray]) -> None:
    """Every target's source token sees exactly the sample's prefix, and its edge has the target's label."""
    edges = plan.edges
    targets = np.flatnonzero(batch.target_mask_N)
    _require(len(targets) == len(edges.target_edges_M), "number of targets")
    _require((edges.target_positions_M == targets - 1).all(), "positions of targets")
    sample_M = np.searchsorted(batch.cu_seqlens, targets, side="right") - 1
    extra_N = None if batch.extra_inputs_NK is None else batch.extra_inputs_NK.tolist()
    extra_of: dict[int, list[int]] = {}
    _require((np.diff(edges.cu_targets) == np.bincount(sample_M, minlength=batch.num_samples)).all(), "cu_targets")
    for target, sample, edge in zip(targets.tolist(), sample_M.tolist(), edges.target_edges_M.tolist(), strict=True):
        where = f"target {target} of sample {sample}"
        start = int(batch.cu_seqlens[sample])
        seen = visible[int(edges.source_E[edge])]
        _require(edges.label_E[edge] == batch.token_ids_N[target], f"{where}: label")
        _require(edges.temperature_E[edge] == batch.temperatures_S[sample], f"{where}: temperature")
        same_length = len(seen) == target - start
        _require(same_length and (plan.token_ids_U[seen] == batch.token_ids_N[start:target]).all(), f"{where}: prefix")
        _require((plan.position_ids_U[seen] == batch.position_ids_N[start:target]).all(), f"{where}: positions")
        if extra_N is not None:
            pairs = zip(seen.tolist(), extra_N[start:target], strict=True)
            _require(all(extra_of.setdefault(token, x) == x for token, x in pairs), f"{where}: extra inputs")


def _executions(plan: ExecutionPlan) -> Iterable[tuple[MicroBatch, bool]]:
    for wave in plan.waves:
        yield from ((plan.micro_batches[m], False) for m in wave.pass1)
        yield from ((plan.micro_batches[m], True) for m in wave.pass2)


def _check_order(plan: ExecutionPlan) -> None:
    """Who runs how often, and descendants before ancestors in pass 2."""
    forward = Counter(mb.index for mb, backward in _executions(plan) if not backward)
    backward = Counter(mb.index for mb, is_backward in _executions(plan) if is_backward)
    for mb in plan.micro_batches:
        wanted = (1, 0) if plan.forward_only else (int(mb.is_spine), 1)
        _require((forward[mb.index], backward[mb.index]) == wanted, f"executions of micro-batch {mb.index}")
    finished: set[int] = set()
    for mb, is_backward in _executions(plan):
        if is_backward:
            writers = {plan.blocks[b].writer for b in mb.path_blocks}
            _require(not writers & finished, f"micro-batch {mb.index} runs after an ancestor's backward")
            finished.add(mb.index)


def _check_completions(plan: ExecutionPlan, batch: SampleBatch) -> None:
    """Every sample with a target completes once, where its first edge turns up and all its outputs are known."""
    edges = plan.edges
    owner = {edge: mb.index for mb in plan.micro_batches for edge in mb.edges_E.tolist()}
    known: set[int] = set()
    completed: list[int] = []
    seen_in_pass2: set[int] = set()
    for mb, backward in _executions(plan):
        if backward:
            for sample in mb.completes.tolist():
                chosen = edges.target_edges_M[edges.cu_targets[sample] : edges.cu_targets[sample + 1]]
                owners = {owner[edge] for edge in chosen.tolist()}
                _require(mb.index in owners, f"sample {sample} completes where it has no edge")
                _require(owners - {mb.index} <= known, f"sample {sample} completes before its outputs are known")
                _require(not owners & seen_in_pass2, f"sample {sample} completes too late")
                completed.append(sample)
            seen_in_pass2.add(mb.index)
        known.add(mb.index)
    wanted = np.flatnonzero(np.diff(edges.cu_targets)).tolist()
    _require(sorted(completed) == wanted, "a sample with targets does not complete exactly once")


def _replay_cache(plan: ExecutionPlan, footprint: KVFootprint) -> int:
    """Follow reads, writes and frees. Returns the peak in bytes."""
    reads_left = Counter(b for mb, _ in _executions(plan) for b in mb.path_blocks)
    policy, page = plan.cache, plan.cache.page_tokens
    for block in plan.blocks:
        num_reads = reads_left[block.block_id]
        is_read = num_reads > 0 or not plan.micro_batches[block.writer].is_spine
        _require(block.ref_count == num_reads and is_read, f"ref count of block {block.block_id}")
        _require(page == 1 or block.num_tokens <= page, f"block {block.block_id} exceeds a page")
        _require(block.block_id in plan.micro_batches[block.writer].own_blocks, f"writer of block {block.block_id}")
    kv: set[int] = set()
    grads: set[int] = set()
    peak = 0
    executions = [(mb, backward) for mb, backward in _executions(plan) if mb.path_blocks or mb.own_blocks]
    for number, (mb, backward) in enumerate(executions, start=1):
        _require(set(mb.path_blocks) <= kv, f"micro-batch {mb.index} reads a block that is not cached")
        if backward:
            grads |= set(mb.path_blocks)
            is_tapped = set(mb.own_blocks) <= grads or not mb.is_spine
            _require(is_tapped, f"micro-batch {mb.index} taps before its descendants")
        if not (backward and mb.is_spine):
            kv |= set(mb.own_blocks)
        rooms = [[policy.room(plan.blocks[b].num_tokens) for b in live] for live in (kv, grads)]
        tokens = [sum(footprint.stored_tokens(room) for room in live) for live in rooms]
        peak = max(peak, tokens[0] * footprint.kv_bytes_per_token + tokens[1] * footprint.grad_bytes_per_token)
        for block in mb.path_blocks:
            reads_left[block] -= 1
            if not reads_left[block] and not policy.keeps:
                kv.remove(block)
        if policy.keeps and number == len(executions):
            kv.clear()
        if backward:
            grads -= set(mb.own_blocks)
    _require(not kv and not grads, f"blocks {sorted(kv | grads)} are never freed")
    return peak
