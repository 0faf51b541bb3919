"""Cutting the tree into micro-batches: spine segments and bins of light subtrees.

Shape legend: U unique tokens in preorder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from psrl.cost import CostFunction
from psrl.tree import PrefixTree
from psrl.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class LightSubtree:
    """A maximal subtree that fits the budget: unique tokens [root, end), hanging off ``attach`` (-1: a root)."""

    root: int
    end: int
    attach: int
    cost: float
    load: int
    """What it takes of a bin's capacity: its tokens, unless capacities are of something else."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.root


@dataclass(slots=True)
class Bin:
    """Light subtrees of one leaf micro-batch. All attach points lie on the root path of ``tip``."""

    members: list[LightSubtree] = field(default_factory=list[LightSubtree])
    tip: int = -1
    """Deepest attach point, -1 without a path."""


def token_costs(tree: PrefixTree, num_rows_U: IntArray, cost: CostFunction) -> FloatArray:
    """[U] marginal forward cost of every unique token: its GEMMs, the keys it sees, its logit rows."""
    base = cost(0, 0, 0)
    per_token, per_pair, per_row = cost(1, 0, 0) - base, cost(0, 1, 0) - base, cost(0, 0, 1) - base
    return per_token + per_pair * (tree.depth_U + 1.0) + per_row * num_rows_U


def is_spine(tree: PrefixTree, max_tokens: int) -> np.ndarray:
    """[U] whether the token's subtree has more than ``max_tokens`` tokens."""
    return tree.end_U - np.arange(tree.num_tokens) > max_tokens


def cut_spine(
    tree: PrefixTree, spine_U: np.ndarray, cost_U: FloatArray, max_tokens: int, *, at_forks: bool = False
) -> list[IntArray]:
    """Cut the spine, in preorder, into segments of at most ``max_tokens`` tokens, of near-equal cost.

    The fewest segments span branches: the end of one, the start of the next. Such a segment's backward waits for both.
    With ``at_forks`` every segment lies on one branch, which needs more segments and least cache.
    """
    tokens = np.flatnonzero(spine_U)
    if not at_forks:
        return _cut_evenly(tokens, cost_U, max_tokens)
    parents = tree.parent_U[tokens[1:]]
    later_siblings = parents != tokens[:-1]
    starts_branch = later_siblings | np.isin(parents, parents[later_siblings])
    runs = np.split(tokens, np.flatnonzero(starts_branch) + 1)
    return [segment for run in runs for segment in _cut_evenly(run, cost_U, max_tokens)]


def _cut_evenly(tokens: IntArray, cost_U: FloatArray, max_tokens: int) -> list[IntArray]:
    total: FloatArray = np.concatenate([[0.0], np.cumsum(cost_U[tokens])])
    segments: list[IntArray] = []
    start = 0
    for left in range(-(-len(tokens) // max_tokens), 0, -1):
        rest = len(tokens) - start
        fewest, most = rest - (left - 1) * max_tokens, min(max_tokens, rest - (left - 1))
        before, all_costs = float(total[start]), float(total[-1])
        wanted = int(np.searchsorted(total, before + (all_costs - before) / left)) - start
        take = min(max(wanted, fewest, 1), most)
        segments.append(tokens[start : start + take])
        start += take
    return segments


def pack_light_subtrees(
    tree: PrefixTree, spine_U: np.ndarray, cost_U: FloatArray, capacity: int, *, load_U: IntArray | None = None
) -> list[Bin]:
    """Pack the light subtrees into few bins of at most ``capacity`` tokens, then even out their cost.

    First-fit decreasing fixes the number of bins; longest-processing-time assignment to that many bins balances cost
    and is taken where it respects budget and root paths. A subtree that no bin can take gets one of its own.

    Args:
        load_U: [U] what the subtree of each token takes of the capacity; None: its tokens.
    """
    items = light_subtrees(tree, spine_U, cost_U, tree.end_U - np.arange(tree.num_tokens) if load_U is None else load_U)
    if not items:
        return []
    fewest = _assign(tree, sorted(items, key=lambda x: (-x.load, x.root)), capacity, num_bins=None)
    assert fewest is not None  # an open number of bins always fits
    if len(fewest) == 1:
        return fewest
    balanced = _assign(tree, sorted(items, key=lambda x: (-x.cost, x.root)), capacity, num_bins=len(fewest))
    if balanced is None or _largest_cost(balanced) > _largest_cost(fewest):
        return fewest
    return balanced


def light_subtrees(tree: PrefixTree, spine_U: np.ndarray, cost_U: FloatArray, load_U: IntArray) -> list[LightSubtree]:
    """What is left of the tree without the spine."""
    below_spine = (tree.parent_U < 0) | spine_U[tree.parent_U]
    roots = np.flatnonzero(~spine_U & below_spine)
    total = np.concatenate([[0.0], np.cumsum(cost_U)])
    return [
        LightSubtree(root, end, attach, float(total[end] - total[root]), load)
        for root, end, attach, load in zip(
            roots.tolist(),
            tree.end_U[roots].tolist(),
            tree.parent_U[roots].tolist(),
            load_U[roots].tolist(),
            strict=True,
        )
    ]


def _assign(tree: PrefixTree, items: list[LightSubtree], most: int, num_bins: int | None) -> list[Bin] | None:
    """Put items in the given order into bins.

    With an open number of bins (None), each goes to the fullest bin that takes it, else to a new one. With a fixed
    number, each goes to the cheapest bin that takes it; None if one fits nowhere.
    """
    capacity = len(items) if num_bins is None else num_bins
    opened = 0 if num_bins is None else num_bins
    tips = np.full(capacity, -1, dtype=np.int64)
    tip_ends = np.full(capacity, tree.num_tokens, dtype=np.int64)  # a bin without a path is compatible with any
    loads = np.zeros(capacity, dtype=np.int64)
    costs = np.zeros(capacity)
    bins = [Bin() for _ in range(opened)]
    for item in items:
        fits = loads[:opened] + item.load <= most
        if item.attach >= 0:
            tip, tip_end, attach = tips[:opened], tip_ends[:opened], item.attach
            fits &= ((tip <= attach) & (attach < tip_end)) | ((attach <= tip) & (tip < tree.end_U[attach]))
        candidates = np.flatnonzero(fits)
        if len(candidates):
            key = costs[candidates] if num_bins is not None else -loads[candidates]
            chosen = int(candidates[np.argmin(key)])
        elif num_bins is None:
            chosen, opened = opened, opened + 1
            bins.append(Bin())
        else:
            return None
        loads[chosen] += item.load
        costs[chosen] += item.cost
        bins[chosen].members.append(item)
        if item.attach > bins[chosen].tip:  # on one root path, deeper means later in preorder
            bins[chosen].tip = tips[chosen] = item.attach
            tip_ends[chosen] = tree.end_U[item.attach]
    return [b for b in bins if b.members]


def _largest_cost(bins: list[Bin]) -> float:
    return max(sum(item.cost for item in b.members) for b in bins)
