"""A prefix tree that grows stream by stream and keeps only distinct tokens.

``psrl.tree.build_tree`` lays a whole batch out at once, in arrays of all its tokens. Here only nodes and the samples'
places in them are kept, so counting needs memory for distinct tokens only. Both agree on what is shared.

Shape legend: V nodes in preorder, S samples, n tokens of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from psrl.analyze.streams import Stream
from psrl.types import BoolArray, IntArray


@dataclass(slots=True)
class SampleTable:
    """One entry a sample, in input order."""

    node: list[int] = field(default_factory=list[int])
    """Node at whose end the sample ends."""
    length: list[int] = field(default_factory=list[int])
    num_targets: list[int] = field(default_factory=list[int])
    uid: list[str] = field(default_factory=list[str])
    session: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(uid, session)."""
    index: list[int] = field(default_factory=list[int])
    where: list[str] = field(default_factory=list[str])


class RadixTree:
    """Nodes with at least one token. Every sample ends at the end of a node."""

    def __init__(self) -> None:
        self.keys: list[IntArray] = []  # [n] per node
        self.targets: list[BoolArray] = []  # [n] per node: a target of any sample
        self.parent: list[int] = []  # -1 at a root
        self.samples = SampleTable()
        self._child: dict[tuple[int, int], int] = {}  # (parent, first key) -> node
        self._unnamed = 0

    @property
    def num_nodes(self) -> int:
        return len(self.keys)

    def add(self, stream: Stream) -> None:
        """Insert a stream and its samples. Copies what is new of it."""
        parent, start = -1, 0
        uid, session = self._labels(stream)
        before = np.concatenate([[0], np.cumsum(stream.mask_N)])
        for i, (end, target_begin) in enumerate(zip(stream.ends, stream.target_begins, strict=True)):
            while start < end:
                parent, start = self._step(stream, parent, start, end)
            self.samples.node.append(parent)
            self.samples.length.append(end)
            self.samples.num_targets.append(int(before[end] - before[target_begin]))
            self.samples.uid.append(uid)
            self.samples.session.append((uid, session))
            self.samples.index.append(stream.first_index + i)
            self.samples.where.append(stream.where)

    def _labels(self, stream: Stream) -> tuple[str, str]:
        """A sample without a session is a trajectory of its own; one without a uid is the only one of its prompt."""
        session, uid = stream.session, stream.uid
        if not session:
            self._unnamed += 1
            session = f"\0{self._unnamed}"
        return uid or f"\0{session}", session

    def _step(self, stream: Stream, parent: int, start: int, end: int) -> tuple[int, int]:
        """Go below ``parent`` by as much of ``keys[start:end]`` as one node holds; make it where there is none."""
        first = int(stream.keys_N[start])
        node = self._child.get((parent, first), -1)
        if node < 0:
            node = self._append(stream.keys_N[start:end].copy(), stream.mask_N[start:end].copy(), parent)
            self._child[parent, first] = node
            return node, end
        shared = common_prefix(self.keys[node], stream.keys_N[start:end])
        if shared < len(self.keys[node]):
            node = self._split(node, shared)
        self.targets[node] |= stream.mask_N[start : start + shared]
        return node, start + shared

    def _append(self, keys: IntArray, targets: BoolArray, parent: int) -> int:
        self.keys.append(keys)
        self.targets.append(targets)
        self.parent.append(parent)
        return self.num_nodes - 1

    def _split(self, node: int, at: int) -> int:
        """Cut the first ``at`` tokens off a node; they become its new parent, which is returned."""
        keys, targets, parent = self.keys[node], self.targets[node], self.parent[node]
        upper = self._append(keys[:at], targets[:at], parent)
        self.keys[node], self.targets[node], self.parent[node] = keys[at:], targets[at:], upper
        self._child[parent, int(keys[0])] = upper
        self._child[upper, int(keys[at])] = node
        return upper

    def root_path(self, node: int) -> list[int]:
        """Nodes from a root down to ``node``."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parent[node]
        return path[::-1]

    def path_keys(self, node: int) -> IntArray:
        """Keys of all tokens from the root to the end of ``node``."""
        return np.concatenate([self.keys[n] for n in self.root_path(node)])

    def path_targets(self, node: int) -> BoolArray:
        """Whether each token of that path is a target of any sample."""
        return np.concatenate([self.targets[n] for n in self.root_path(node)])


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    step = 1 << 12  # most differences come early: do not compare megabytes to find one
    for start in range(0, n, step):
        differs = a[start : min(start + step, n)] != b[start : min(start + step, n)]
        if differs.any():
            return start + int(differs.argmax())
        step = min(4 * step, 1 << 20)
    return n


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Nodes of a radix tree in preorder, siblings by subtree size, largest first, as the planner orders them."""

    order_V: IntArray
    """Node of the radix tree."""
    parent_V: IntArray
    """Rank of the parent, -1 at a root."""
    length_V: IntArray
    """Tokens of the node."""
    depth_V: IntArray
    """Tokens above the node."""
    below_V: IntArray
    """Tokens of its descendants."""
    num_children_V: IntArray
    rank_S: IntArray
    """Preorder rank of the node in which each sample ends."""

    @property
    def num_tokens(self) -> int:
        return int(self.length_V.sum())

    @classmethod
    def of(cls, tree: RadixTree) -> TreeShape:
        num = tree.num_nodes
        length = np.fromiter((len(k) for k in tree.keys), np.int64, num)
        parent = np.asarray(tree.parent, dtype=np.int64)
        depth = np.zeros(num, dtype=np.int64)
        subtree = length.copy()
        top_down = _top_down(tree.parent)
        for node in top_down:
            if parent[node] >= 0:
                depth[node] = depth[parent[node]] + length[parent[node]]
        for node in reversed(top_down):
            if parent[node] >= 0:
                subtree[parent[node]] += subtree[node]
        order = _preorder(tree.parent, subtree.tolist())
        rank = np.empty(num, dtype=np.int64)
        rank[order] = np.arange(num)
        parent_V = np.where(parent[order] >= 0, rank[parent[order]], -1)
        return cls(
            order_V=order,
            parent_V=parent_V,
            length_V=length[order],
            depth_V=depth[order],
            below_V=(subtree - length)[order],
            num_children_V=np.bincount(parent_V[parent_V >= 0], minlength=num),
            rank_S=rank[np.asarray(tree.samples.node, dtype=np.int64)],
        )


def _children(parent: list[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    return children


def _top_down(parent: list[int]) -> list[int]:
    children = _children(parent)
    out: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        out.append(node)
        stack += children.get(node, ())
    return out


def _preorder(parent: list[int], subtree: list[int]) -> IntArray:
    children = _children(parent)
    for siblings in children.values():
        siblings.sort(key=lambda node: subtree[node])  # popped from the end: the largest first
    out: list[int] = []
    stack = list(children.get(-1, ()))
    while stack:
        node = stack.pop()
        out.append(node)
        stack += children.get(node, ())
    return np.asarray(out, dtype=np.int64)
