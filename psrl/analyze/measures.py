"""Exact counts over a prefix tree: sharing by scope, spine by budget, tree packing.

Shape legend: V nodes in preorder, S samples, D samples in depth-first order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from psrl.analyze.radix import RadixTree, TreeShape
from psrl.analyze.streams import positions_of, tokens_of
from psrl.cost import Work
from psrl.micro_batching import pack_into_tries
from psrl.types import IntArray, SampleBatch

_NO_LIMIT = np.iinfo(np.int64).max


def unique_within(tree: RadixTree, labels: Sequence[Hashable]) -> int:
    """Distinct tokens if only samples with equal labels shared: the sum over labels of their own tree's tokens."""
    members: dict[Hashable, list[int]] = {}
    for sample, label in enumerate(labels):
        members.setdefault(label, []).append(sample)
    lengths = [len(keys) for keys in tree.keys]
    total = 0
    for samples in members.values():
        seen: set[int] = set()
        for sample in samples:
            node = tree.samples.node[sample]
            while node >= 0 and node not in seen:
                seen.add(node)
                total += lengths[node]
                node = tree.parent[node]
    return total


def spine_tokens(shape: TreeShape, max_tokens: int) -> int:
    """Tokens whose subtree has more than ``max_tokens`` tokens: those that run forward once more."""
    # The i-th token of a node has length - i + below tokens in its subtree.
    return int(np.clip(shape.length_V + shape.below_V - max_tokens, 0, shape.length_V).sum())


def total_work(tree: RadixTree) -> Work:
    """What an engine without sharing does: every token of every sample, each with a logit row, as veRL does."""
    lengths = np.asarray(tree.samples.length, dtype=np.int64)
    return Work(int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum()), int(lengths.sum()))


def shared_prefixes(shape: TreeShape, order_D: IntArray) -> IntArray:
    """[D] common prefix of each sample with the one before it in depth-first order; 0 for the first."""
    num_nodes = len(shape.length_V)
    ranks = shape.rank_S[order_D]
    # Between two visits the traversal goes up to where the shallowest node that it enters next is attached.
    lowest = np.append(shape.depth_V, _NO_LIMIT)
    out = np.zeros(len(order_D), dtype=np.int64)
    if len(order_D) > 1:
        bounds = np.stack([ranks[:-1] + 1, ranks[1:] + 1], axis=1)
        bounds = np.minimum(bounds, num_nodes).ravel()
        mins = np.minimum.reduceat(lowest, bounds)[::2]
        same = ranks[1:] == ranks[:-1]
        ends = (shape.depth_V + shape.length_V)[ranks[1:]]
        out[1:] = np.where(same, ends, mins)
    return out


@dataclass(frozen=True, slots=True)
class TreePacking:
    """Micro-batches of whole samples that share within themselves only."""

    work: Work
    """Of all micro-batches; a logit row for every token."""
    num_micro_batches: int
    largest: int
    """Tokens of the largest: above the budget where one sample is."""


def tree_packing(shape: TreeShape, lengths_S: IntArray, max_tokens: int) -> TreePacking:
    """Sharing inside a micro-batch only, as tree training in AReaL, TRL and verl-MAGI does.

    Without a cache a sample cannot be cut, so whole samples are packed into tries of at most ``max_tokens`` tokens, and
    a group that is larger is cut to several, which compute its prefix again. Samples come in depth-first order, so that
    those that share meet, and each joins the trie that already holds most of it among those with room. A sample longer
    than the budget runs in a micro-batch of its own: real systems refuse such a budget and need micro-batches of the
    longest sample (``max_tokens=max(lengths_S)`` gives that).
    """
    order = np.argsort(shape.rank_S, kind="stable")
    common = np.append(shared_prefixes(shape, order)[1:], 0)[::-1]  # with the one that came before, in reverse order
    lengths = lengths_S[order][::-1]
    trie, held = pack_into_tries(lengths, common, max_tokens)
    sizes = np.bincount(trie, weights=lengths - held).astype(np.int64)
    pairs = int((lengths * (lengths + 1) // 2 - held * (held + 1) // 2).sum())
    total = int(sizes.sum())
    return TreePacking(Work(total, pairs, total), len(sizes), int(sizes.max(initial=0)))


def plan_batch(tree: RadixTree, shape: TreeShape) -> SampleBatch:
    """Samples with the same tree and the same edges, but only as many as the tree has leaves.

    Every other sample is a prefix of one of these, and its targets are among theirs, so the plan has the same
    micro-batches, blocks and bytes. Only counts of samples and completions differ.
    """
    leaves = shape.order_V[shape.num_children_V == 0].tolist()
    keys_N = np.concatenate([tree.path_keys(leaf) for leaf in leaves])
    lengths = [sum(len(tree.keys[node]) for node in tree.root_path(leaf)) for leaf in leaves]
    return SampleBatch(
        token_ids_N=tokens_of(keys_N),
        position_ids_N=positions_of(keys_N),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        target_mask_N=np.concatenate([tree.path_targets(leaf) for leaf in leaves]),
        group_ids_S=np.zeros(len(leaves), dtype=np.int64),
        temperatures_S=np.ones(len(leaves)),
    )


def shape_record(tree: RadixTree, shape: TreeShape) -> dict[str, float | int]:
    """The tree's shape in a few numbers."""
    lengths = np.asarray(tree.samples.length, dtype=np.int64)
    is_leaf = shape.num_children_V == 0
    forks = shape.num_children_V[shape.num_children_V > 1]
    return {
        "roots": int((shape.parent_V < 0).sum()),
        "nodes": len(shape.length_V),
        "leaves": int(is_leaf.sum()),
        "forks": len(forks),
        "largest_fork": int(forks.max(initial=0)),
        "longest_sample": int(lengths.max(initial=0)),
        "mean_sample": float(lengths.mean()),
        "median_node_tokens": float(np.median(shape.length_V)),
        "tokens_per_unique_token": float(lengths.sum() / shape.num_tokens),
    }
