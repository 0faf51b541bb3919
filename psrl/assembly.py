"""Turning token sets into micro-batches: attention intervals, KV blocks, edges and logit rows.

Shape legend: U unique tokens, T local tokens, P path tokens, S = P + T keys, E edges, R logit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psrl.packing import Bin
from psrl.tree import PrefixTree
from psrl.types import CachePolicy, Edges, FloatArray, IntArray, KVBlock, MicroBatch, Span


@dataclass(frozen=True, slots=True)
class Pieces:
    """Micro-batches (spine segments first, in preorder) and blocks, not ordered for execution yet."""

    micro_batches: tuple[MicroBatch, ...]
    blocks: tuple[KVBlock, ...]
    num_segments: int
    tip_segments: tuple[int, ...]
    """Per micro-batch, the segment that holds the end of its path; -1 without a path."""
    last_descendant: tuple[int, ...]
    """Per segment, the last segment whose backward has to come before its own (itself if none has to)."""
    owner_U: IntArray
    """Micro-batch that computes each unique token."""


@dataclass(frozen=True, slots=True)
class _Local:
    """Attention of one micro-batch: local tokens, one past the last local query that sees each local or path key."""

    tokens_T: IntArray
    last_T: IntArray
    last_P: IntArray
    tip: int


def assemble(
    tree: PrefixTree,
    edges: Edges,
    segments: Sequence[IntArray],
    bins: Sequence[Bin],
    cost_U: FloatArray,
    *,
    executions: int,
    cache: CachePolicy,
) -> Pieces:
    """Build micro-batches and blocks.

    Args:
        executions: how often a spine segment runs (2 in an update: both passes read its path).
        cache: how blocks are cut, and whether leaves have some.
    """
    locals_ = [_segment(tree, tokens) for tokens in segments] + [_leaf(tree, b) for b in bins]
    owner_U = np.empty(tree.num_tokens, dtype=np.int64)
    index_U = np.empty(tree.num_tokens, dtype=np.int64)  # place of each token in its micro-batch
    for m, local in enumerate(locals_):
        owner_U[local.tokens_T] = m
        index_U[local.tokens_T] = np.arange(len(local.tokens_T))

    spans, block_of_end = _cut_blocks(tree, segments, [local.tip for local in locals_], cache.page_tokens)
    if cache.stores_leaves:
        spans += [span for packed in bins for span in _leaf_blocks(tree, packed, cache.page_tokens)]
    paths = [_path_blocks(tree, spans, block_of_end, local.tip) for local in locals_]
    ref_counts = [0] * len(spans)
    for m, path in enumerate(paths):
        for block in path:
            ref_counts[block] += executions if m < len(segments) else 1
    blocks = tuple(KVBlock(b, span, int(owner_U[span.start]), ref_counts[b]) for b, span in enumerate(spans))
    own: list[list[int]] = [[] for _ in locals_]
    for block in blocks:
        own[block.writer].append(block.block_id)
    for written in own[len(segments) :]:
        written.sort(key=lambda b: int(index_U[spans[b].start]))

    outputs = _split_edges(edges, owner_U, index_U, len(locals_))
    micro_batches = tuple(
        MicroBatch(
            index=m,
            is_spine=m < len(segments),
            tokens_T=local.tokens_T,
            first_S=np.concatenate([np.zeros_like(local.last_P), np.arange(len(local.tokens_T))]),
            last_S=np.concatenate([local.last_P, local.last_T]),
            path_blocks=paths[m],
            own_blocks=tuple(own[m]),
            completes=np.empty(0, dtype=np.int64),
            cost=float(cost_U[local.tokens_T].sum()),
            **outputs[m],
        )
        for m, local in enumerate(locals_)
    )
    tip_segments = tuple(int(owner_U[local.tip]) if local.tip >= 0 else -1 for local in locals_)
    return Pieces(
        micro_batches, blocks, len(segments), tip_segments, _last_descendants(blocks, paths, len(segments)), owner_U
    )


def _segment(tree: PrefixTree, tokens_T: IntArray) -> _Local:
    """A run of spine tokens in preorder: a key is seen up to the end of its subtree."""
    tip = int(tree.parent_U[tokens_T[0]])
    path_P = tree.ancestors(tip)
    return _Local(
        tokens_T,
        np.searchsorted(tokens_T, tree.end_U[tokens_T]),
        np.searchsorted(tokens_T, tree.end_U[path_P]),
        tip,
    )


def _leaf(tree: PrefixTree, packed: Bin) -> _Local:
    """Complete subtrees, the most deeply attached first, so that every path key is seen by a leading run of queries."""
    members = sorted(packed.members, key=lambda x: (-x.attach, x.root))
    sizes = np.asarray([x.num_tokens for x in members], dtype=np.int64)
    roots = np.asarray([x.root for x in members], dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    shift_T = np.repeat(offsets - roots, sizes)  # local index minus unique index
    tokens_T = np.arange(int(sizes.sum()), dtype=np.int64) - shift_T
    path_P = tree.ancestors(packed.tip)
    # Members with an attach point at or below path token p are a leading run: count their tokens.
    attach = np.asarray([x.attach for x in members], dtype=np.int64)
    num_below = np.searchsorted(-attach, -path_P, side="right")
    last_P = np.concatenate([[0], np.cumsum(sizes)])[num_below]
    return _Local(tokens_T, tree.end_U[tokens_T] + shift_T, last_P, packed.tip)


# ------------------------------------------------------------------------------------------------------- blocks
def _cut_blocks(
    tree: PrefixTree, segments: Sequence[IntArray], tips: Sequence[int], page_tokens: int
) -> tuple[list[Span], dict[int, int]]:
    """Cut the spine wherever the set of readers may change: segment starts, forks, and ends of paths. Also at pages.

    Returns the spans in preorder and, for the last token of each, its block.
    """
    if not segments:
        return [], {}
    spine = np.concatenate(segments)
    starts_block = np.zeros(tree.num_tokens + 1, dtype=bool)
    starts_block[[tokens[0] for tokens in segments]] = True
    # The parent is not the spine token just before, or a subtree that is no spine lies between.
    forks = spine[1:][(tree.parent_U[spine[1:]] != spine[:-1]) | (spine[1:] != spine[:-1] + 1)]
    starts_block[spine[0]] = True
    starts_block[forks] = True
    starts_block[tree.parent_U[forks] + 1] = True
    starts_block[np.asarray(tips, dtype=np.int64) + 1] = True
    if page_tokens > 1:
        starts_block[:-1] |= tree.depth_U % page_tokens == 0
    bounds = np.flatnonzero(starts_block[spine])
    firsts = spine[bounds]
    lasts = spine[np.append(bounds[1:], len(spine)) - 1]
    spans = [Span(a, b + 1) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    return spans, {span.end - 1: block for block, span in enumerate(spans)}


def _leaf_blocks(tree: PrefixTree, packed: Bin, page_tokens: int) -> list[Span]:
    """Blocks of what a leaf micro-batch computes: its subtrees, cut into pages."""
    spans: list[Span] = []
    for member in packed.members:
        starts = [member.root]
        if page_tokens > 1:
            tokens = np.arange(member.root + 1, member.end)
            cuts = (tree.depth_U[tokens] % page_tokens == 0) | (tree.parent_U[tokens] != tokens - 1)
            starts += tokens[cuts].tolist()
        spans += [Span(a, b) for a, b in zip(starts, [*starts[1:], member.end], strict=True)]
    return spans


def _path_blocks(tree: PrefixTree, spans: Sequence[Span], block_of_end: dict[int, int], tip: int) -> tuple[int, ...]:
    """Blocks of the root path of ``tip``, root first."""
    path: list[int] = []
    while tip >= 0:
        block = block_of_end[tip]
        path.append(block)
        tip = int(tree.parent_U[spans[block].start])
    return tuple(reversed(path))


def _last_descendants(
    blocks: Sequence[KVBlock], paths: Sequence[tuple[int, ...]], num_segments: int
) -> tuple[int, ...]:
    """Per segment, the last segment whose backward has to come first: its readers', and theirs in turn.

    A segment may span several branches, so a reader of a reader need not read the segment itself.
    """
    last = list(range(num_segments))
    for reader in reversed(range(num_segments)):
        for block in paths[reader]:
            writer = blocks[block].writer
            last[writer] = max(last[writer], last[reader])
    return tuple(last)


# ------------------------------------------------------------------------------------------------ edges and rows
def _split_edges(edges: Edges, owner_U: IntArray, index_U: IntArray, num: int) -> list[dict[str, np.ndarray]]:
    """Edges, rows and row temperatures of every micro-batch, as MicroBatch fields."""
    owner_E, index_E = owner_U[edges.source_E], index_U[edges.source_E]
    order = np.lexsort((edges.temperature_E, index_E, owner_E))
    bounds = np.searchsorted(owner_E[order], np.arange(num + 1))
    out: list[dict[str, np.ndarray]] = []
    for m in range(num):
        chosen = order[bounds[m] : bounds[m + 1]]
        token, temperature = index_E[chosen], edges.temperature_E[chosen]
        new_row = np.ones(len(chosen), dtype=bool)
        new_row[1:] = (np.diff(token) != 0) | (np.diff(temperature) != 0)
        out.append(
            {
                "rows_R": token[new_row],
                "row_temperature_R": temperature[new_row],
                "edges_E": chosen,
                "edge_rows_E": np.cumsum(new_row) - 1,
            }
        )
    return out
