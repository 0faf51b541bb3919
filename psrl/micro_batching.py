"""Ways of dividing a prefix tree into micro-batches. psrl's is ``by_tokens``; the others stand for other systems.

Shape legend: N tokens of all samples, U unique tokens in preorder, D samples in depth-first order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from psrl.packing import Bin, cut_spine, is_spine, light_subtrees, pack_light_subtrees
from psrl.tree import PrefixTree
from psrl.types import BoolArray, FloatArray, IntArray, SampleBatch


@dataclass(frozen=True, slots=True)
class Division:
    """What is spine, and the micro-batches of the rest."""

    spine_U: BoolArray
    bins: list[Bin]
    cut: Callable[[bool], list[IntArray]]
    """Cuts the spine, in preorder, into segments; True: so that each lies on one branch."""


Divide = Callable[[SampleBatch, PrefixTree, FloatArray, int], Division]
"""Divides the tree of a batch. Takes the [U] cost of every unique token and the token budget."""


def by_tokens(batch: SampleBatch, tree: PrefixTree, cost_U: FloatArray, max_tokens: int) -> Division:
    """At most ``max_tokens`` tokens each, cut anywhere."""
    spine_U = is_spine(tree, max_tokens)
    return Division(
        spine_U,
        pack_light_subtrees(tree, spine_U, cost_U, max_tokens),
        lambda at_forks: cut_spine(tree, spine_U, cost_U, max_tokens, at_forks=at_forks),
    )


def by_runs(batch: SampleBatch, tree: PrefixTree, cost_U: FloatArray, max_tokens: int) -> Division:
    """At most ``max_tokens`` tokens, cut only between runs, the tokens that the same samples have.

    A longer run is a micro-batch of its own.
    """
    return _by_whole_runs(tree, cost_U, run_starts(tree), max_tokens)


def by_pages(page_tokens: int) -> Divide:
    """At most ``max_tokens`` tokens, cut only between pages, or one page. For trees that part only there."""

    def divide(batch: SampleBatch, tree: PrefixTree, cost_U: FloatArray, max_tokens: int) -> Division:
        return _by_whole_runs(tree, cost_U, np.flatnonzero(tree.depth_U % page_tokens == 0), max_tokens)

    return divide


def by_rows(batch: SampleBatch, tree: PrefixTree, cost_U: FloatArray, max_tokens: int) -> Division:
    """Equally many samples each: as many as ``max_tokens`` tokens hold if all were as long as the longest.

    What more samples than that have in common is spine, of which a micro-batch takes as many runs.
    """
    num_rows = max(1, max_tokens // int(batch.seqlens_S.max()))
    rows_U = _samples_of_tokens(tree)
    starts = run_starts(tree)
    run_U = np.searchsorted(starts, np.arange(tree.num_tokens), side="right") - 1
    spine_U = ((rows_U[starts] > num_rows) & _has_descendants(tree, starts))[run_U]
    runs = [run for run in _runs(tree, starts) if spine_U[run[0]]]

    def cut(at_forks: bool) -> list[IntArray]:
        step = 1 if at_forks else num_rows
        return [np.concatenate(runs[i : i + step]) for i in range(0, len(runs), step)]

    return Division(spine_U, pack_light_subtrees(tree, spine_U, cost_U, num_rows, load_U=rows_U), cut)


def by_labels(batch: SampleBatch, tree: PrefixTree, cost_U: FloatArray, max_tokens: int) -> Division:
    """A micro-batch for every label that ``pack_into_tries`` gave the samples."""
    assert batch.extra_inputs_NK is not None
    label_U = np.empty(tree.num_tokens, dtype=np.int64)
    label_U[tree.index_N] = batch.extra_inputs_NK[:, -1]
    nothing_U = np.zeros(tree.num_tokens, dtype=bool)
    bins: dict[int, Bin] = {}
    for item in light_subtrees(tree, nothing_U, cost_U, tree.end_U - np.arange(tree.num_tokens)):
        bins.setdefault(int(label_U[item.root]), Bin()).members.append(item)
    return Division(nothing_U, list(bins.values()), lambda at_forks: [])


# --------------------------------------------------------------------------------------------------------- labels
def pack_into_tries(lengths_D: IntArray, common_D: IntArray, max_tokens: int) -> tuple[IntArray, IntArray]:
    """Pack whole samples into tries of at most ``max_tokens`` tokens; a longer sample gets one of its own.

    Samples come in depth-first order, so that those that share meet, and each joins the trie that already holds most of
    it among those with room.

    Args:
        common_D: tokens that each sample has in common with the one before it.

    Returns:
        [D] trie of every sample, and [D] tokens of it that the trie held already.
    """
    num_samples = len(lengths_D)
    trie_D, held_D = np.zeros(num_samples, dtype=np.int64), np.zeros(num_samples, dtype=np.int64)
    sizes = np.zeros(num_samples, dtype=np.int64)
    shared = np.zeros(num_samples, dtype=np.int64)  # of each trie with the current sample
    opened = 0
    for sample, (length, common) in enumerate(zip(lengths_D.tolist(), common_D.tolist(), strict=True)):
        open_shared = np.minimum(shared[:opened], common, out=shared[:opened])
        fits = np.flatnonzero(sizes[:opened] + length - open_shared <= max_tokens)
        if len(fits):
            # Among equals the fullest, so that the rest stays open for what does not fit elsewhere.
            best = fits[np.lexsort((-sizes[fits], -open_shared[fits]))[0]] if len(fits) > 1 else fits[0]
        else:
            best, opened = opened, opened + 1
        held_D[sample], trie_D[sample] = shared[best], best
        sizes[best] += length - shared[best]
        shared[best] = length
    return trie_D, held_D


def with_labels(batch: SampleBatch, labels_N: IntArray) -> SampleBatch:
    """The batch with one more input that has to be equal: tokens with other labels are not shared."""
    label_N1, extra = labels_N[:, None], batch.extra_inputs_NK
    return dataclasses.replace(
        batch, extra_inputs_NK=label_N1 if extra is None else np.concatenate([extra, label_N1], axis=1)
    )


def trie_labels(batch: SampleBatch, tree: PrefixTree, max_tokens: int) -> IntArray:
    """[N] micro-batch of every token where whole samples are packed into tries."""
    return next(tries_below(batch, tree, max_tokens, (0,)))


def tries_below(batch: SampleBatch, tree: PrefixTree, max_tokens: int, depths: Iterable[int]) -> Iterator[IntArray]:
    """For every depth, [N] trie of every token, where what samples have below the depth is packed into tries; -1 above
    it."""
    last_S = tree.index_N[batch.cu_seqlens[1:] - 1]
    order_D = np.argsort(-last_S, kind="stable")  # longer samples before their prefixes
    index_N, offsets = tree.index_N, batch.cu_seqlens.tolist()
    common = [0]
    for before, sample in pairwise(order_D.tolist()):
        ours = index_N[offsets[sample] : offsets[sample + 1]]
        theirs = index_N[offsets[before] : offsets[before + 1]][: len(ours)]
        common.append(int((ours[: len(theirs)] == theirs).sum()))
    for depth in depths:
        below_D, common_D = (np.maximum(x - depth, 0) for x in (batch.seqlens_S[order_D], np.asarray(common)))
        trie_D, _ = pack_into_tries(below_D, common_D, max_tokens)
        trie_S = np.empty_like(trie_D)
        trie_S[order_D] = trie_D
        yield np.where(tree.depth_U[index_N] < depth, -1, np.repeat(trie_S, batch.seqlens_S))


def page_labels(batch: SampleBatch, tree: PrefixTree, page_tokens: int) -> IntArray:
    """[N] labels that are equal where whole pages of ``page_tokens`` tokens, and all before them, are.

    A partial page is its sample's own, as in vLLM.
    """
    seqlens = batch.seqlens_S
    starts_N = np.repeat(batch.cu_seqlens[:-1], seqlens)
    sample_N = np.repeat(np.arange(batch.num_samples), seqlens)
    position_N = np.arange(batch.num_tokens) - starts_N
    last_N = (position_N // page_tokens + 1) * page_tokens - 1
    is_full_N = last_N < seqlens[sample_N]
    return np.where(is_full_N, tree.index_N[np.where(is_full_N, starts_N + last_N, 0)], -1 - sample_N)


# ----------------------------------------------------------------------------------------------------------- runs
def run_starts(tree: PrefixTree) -> IntArray:
    """First tokens of the runs: maximal chains of tokens that the same samples have."""
    rows_U = _samples_of_tokens(tree)
    starts_U = tree.parent_U != np.arange(-1, tree.num_tokens - 1)
    starts_U[:1] = True
    starts_U[1:] |= rows_U[1:] != rows_U[:-1]
    return np.flatnonzero(starts_U)


def _samples_of_tokens(tree: PrefixTree) -> IntArray:
    """[U] samples that have each token."""
    return np.bincount(tree.index_N, minlength=tree.num_tokens)


def _runs(tree: PrefixTree, starts: IntArray) -> Sequence[IntArray]:
    return np.split(np.arange(tree.num_tokens), starts[1:])


def _has_descendants(tree: PrefixTree, starts: IntArray) -> BoolArray:
    return tree.end_U[starts] > np.append(starts[1:], tree.num_tokens)


def _by_whole_runs(tree: PrefixTree, cost_U: FloatArray, starts: IntArray, max_tokens: int) -> Division:
    is_large = (tree.end_U[starts] - starts > max_tokens) & _has_descendants(tree, starts)
    spine_U = np.repeat(is_large, np.diff(np.append(starts, tree.num_tokens)))
    runs = [run for run in _runs(tree, starts) if spine_U[run[0]]]

    def cut(at_forks: bool) -> list[IntArray]:
        groups: list[list[IntArray]] = []
        room = 0
        for run in runs:
            if at_forks or len(run) > room:
                groups.append([])
                room = max_tokens
            groups[-1].append(run)
            room -= len(run)
        return [np.concatenate(group) for group in groups]

    return Division(spine_U, pack_light_subtrees(tree, spine_U, cost_U, max_tokens), cut)
