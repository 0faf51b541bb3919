"""The prefix tree: a compressed radix tree over the samples of a mini-batch, laid out in preorder.

Samples are brought into lexicographic order of exact integer keys (one per token, injective in token id, position
and every other per-token input). Each sample then adds only the tokens after its longest common prefix with its
predecessor, so building costs one comparison per token plus the sort.

Shape legend: N tokens of all samples, S samples, U unique tokens in preorder, K extra inputs per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from psrl.errors import InputError
from psrl.types import ExecutionPlan, IntArray, SampleBatch

_POSITION_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Unique tokens in preorder. Siblings are ordered by subtree size, largest first, so that long chains stay whole.

    The tokens of a subtree are contiguous: those of token t are ``[t, end_U[t])``.
    """

    token_ids_U: IntArray
    position_ids_U: IntArray
    parent_U: IntArray
    """Unique token before it, -1 at a root."""
    end_U: IntArray
    """One past the last unique token of its subtree."""
    depth_U: IntArray
    """Number of ancestors."""
    index_N: IntArray
    """Unique token of every sample token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_U)

    def ancestors(self, token: int) -> IntArray:
        """Unique tokens from the root down to and including ``token``; empty for -1."""
        runs: list[IntArray] = []
        while token >= 0:
            # Inside a node, parents count down by one: find how far up the run goes.
            start = self.run_start(token)
            runs.append(np.arange(start, token + 1, dtype=np.int64))
            token = int(self.parent_U[start])
        return np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.int64)

    def run_start(self, token: int) -> int:
        """First token of the run ``start, start + 1, …, token`` in which each is the parent of the next."""
        depth, low, high = int(self.depth_U[token]), 0, int(self.depth_U[token])
        # depth_U[token - i] == depth - i exactly while token - i is an ancestor: preorder makes it monotone.
        while low < high:
            step = (low + high + 1) // 2
            is_ancestor = self.end_U[token - step] > token and self.depth_U[token - step] == depth - step
            low, high = (step, high) if is_ancestor else (low, step - 1)
        return token - low


def tree_of(plan: ExecutionPlan, batch: SampleBatch) -> PrefixTree:
    """The tree that ``plan`` was made of, whatever kept equal tokens of ``batch`` apart."""
    num_unique = len(plan.token_ids_U)
    parent_U, depth_U = np.full(num_unique, -1, dtype=np.int64), np.zeros(num_unique, dtype=np.int64)
    end_U = np.arange(1, num_unique + 1, dtype=np.int64)
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        path = plan.index_N[start:end]
        parent_U[path[1:]] = path[:-1]
        depth_U[path] = np.arange(len(path))
        end_U[path] = np.maximum(end_U[path], path[-1] + 1)  # the last token of a subtree ends a sample
    return PrefixTree(plan.token_ids_U, plan.position_ids_U, parent_U, end_U, depth_U, plan.index_N)


def token_keys(batch: SampleBatch) -> IntArray:
    """[N] integers that are equal exactly where two tokens get the same inputs.

    Raises:
        InputError: a token id or position is negative or does not fit 31 bits.
    """
    for name, values in (("token id", batch.token_ids_N), ("position", batch.position_ids_N)):
        if len(values) and (values.min() < 0 or values.max() >= _POSITION_LIMIT):
            raise InputError(f"a {name} is out of range 0 .. {_POSITION_LIMIT - 1}: {values.min()} .. {values.max()}")
    keys = (batch.position_ids_N << 32) | batch.token_ids_N
    if batch.extra_inputs_NK is None:
        return keys
    for k in range(batch.extra_inputs_NK.shape[1]):
        _, ranks = np.unique(keys, return_inverse=True)
        values, extra = np.unique(batch.extra_inputs_NK[:, k], return_inverse=True)
        keys = np.ravel(ranks).astype(np.int64) * len(values) + np.ravel(extra)
    return keys


def build_tree(batch: SampleBatch) -> PrefixTree:
    """Build the prefix tree of all samples.

    Raises:
        InputError: a sample is empty, or ids are out of range.
    """
    seqlens = batch.seqlens_S
    if (seqlens <= 0).any():
        raise InputError(f"sample {int(np.argmin(seqlens))} has no tokens")
    nodes = _radix_nodes(token_keys(batch), batch.cu_seqlens)
    return _lay_out(batch, nodes)


@dataclass(slots=True)
class _Nodes:
    """Radix nodes: tokens [begin, finish) of sample ``owner``, below node ``parent`` (-1 at a root)."""

    begin: list[int]
    finish: list[int]
    owner: list[int]
    parent: list[int]
    leaf_S: list[int]
    """Node that holds each sample's last token, at its end."""

    def add(self, begin: int, finish: int, owner: int, parent: int) -> int:
        self.begin.append(begin)
        self.finish.append(finish)
        self.owner.append(owner)
        self.parent.append(parent)
        return len(self.begin) - 1


def _radix_nodes(keys_N: IntArray, cu_seqlens: IntArray) -> _Nodes:
    offsets = cu_seqlens.tolist()
    num_samples = len(offsets) - 1
    # Big-endian bytes of non-negative integers sort like the integers; comparing them is one memcmp.
    packed = keys_N.astype(">i8").tobytes()
    rows = [packed[8 * offsets[s] : 8 * offsets[s + 1]] for s in range(num_samples)]
    order = sorted(range(num_samples), key=rows.__getitem__)

    nodes = _Nodes([], [], [], [], [-1] * num_samples)
    stack: list[int] = []  # the rightmost root path
    previous = -1
    for sample in order:
        length = offsets[sample + 1] - offsets[sample]
        shared = 0
        if previous >= 0:
            shared = _common_prefix(keys_N, offsets[previous], offsets[previous + 1], offsets[sample], length)
        lower = -1
        while stack and nodes.finish[stack[-1]] > shared:
            lower = stack.pop()
        if lower >= 0 and nodes.begin[lower] < shared:  # the fork is inside this node: split it
            upper = nodes.add(nodes.begin[lower], shared, nodes.owner[lower], nodes.parent[lower])
            nodes.begin[lower], nodes.parent[lower] = shared, upper
            stack.append(upper)
        if length > shared:
            stack.append(nodes.add(shared, length, sample, stack[-1] if stack else -1))
        nodes.leaf_S[sample] = stack[-1]
        previous = sample
    return nodes


def _common_prefix(keys_N: IntArray, a: int, a_end: int, b: int, length: int) -> int:
    n = min(a_end - a, length)
    differs = keys_N[a : a + n] != keys_N[b : b + n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _lay_out(batch: SampleBatch, nodes: _Nodes) -> PrefixTree:
    begin, finish, owner, parent = (np.asarray(x, dtype=np.int64) for x in
                                    (nodes.begin, nodes.finish, nodes.owner, nodes.parent))  # fmt: skip
    length = finish - begin
    subtree = np.copy(length)
    bottom_up = np.argsort(-begin, kind="stable")  # a child begins where its parent finishes, or deeper
    for node in bottom_up.tolist():
        if parent[node] >= 0:
            subtree[parent[node]] += subtree[node]

    # Preorder start of every node: parents first, siblings by size (ties: creation order).
    start = np.zeros(len(begin), dtype=np.int64)
    cursor: dict[int, int] = {-1: 0}
    for node in np.lexsort((np.arange(len(begin)), -subtree, begin)).tolist():
        above = int(parent[node])
        start[node] = cursor[above]
        cursor[above] += int(subtree[node])
        cursor[node] = int(start[node] + length[node])

    by_start = np.argsort(start)
    begin, length, owner, start, subtree = (x[by_start] for x in (begin, length, owner, start, subtree))
    rank = np.empty_like(by_start)
    rank[by_start] = np.arange(len(by_start))
    parent = np.where(parent[by_start] >= 0, rank[parent[by_start]], -1)

    source = _ranges(batch.cu_seqlens[owner] + begin, length)  # sample token that each unique token copies
    unique = len(source)
    parent_U = np.arange(-1, unique - 1, dtype=np.int64)
    parent_U[start] = np.where(parent >= 0, (start + length - 1)[parent], -1)
    return PrefixTree(
        token_ids_U=batch.token_ids_N[source],
        position_ids_U=batch.position_ids_N[source],
        parent_U=parent_U,
        end_U=np.repeat(start + subtree, length),
        depth_U=_ranges(begin, length),
        index_N=_sample_index(rank[np.asarray(nodes.leaf_S, dtype=np.int64)], parent, start, length),
    )


def _sample_index(leaf_S: IntArray, parent: IntArray, start: IntArray, length: IntArray) -> IntArray:
    """Unique token of every sample token: the node ranges of each sample's root path, concatenated."""
    parents: list[int] = parent.tolist()
    path_nodes: list[int] = []
    leaves: list[int] = leaf_S.tolist()
    for node in leaves:
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        path_nodes.extend(reversed(path))
    chosen = np.asarray(path_nodes, dtype=np.int64)
    return _ranges(start[chosen], length[chosen])


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate ``arange(start, start + length)`` over all pairs."""
    total = int(lengths.sum())
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(total, dtype=np.int64)
