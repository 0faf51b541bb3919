"""What is kept of finished prefixes, found again by exact token ids: a radix tree with a byte budget, least recently
used first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TokenIds = NDArray[np.int64]
Span = tuple[Tensor, ...]
"""What is kept of consecutive tokens (K/V, and experts where routes are recorded); tokens are the last dimension but
one of every tensor."""


class _Node:
    """Tokens below its parent's prefix, and what is kept of them."""

    __slots__ = ("children", "ids_S", "last_used", "parent", "span")

    def __init__(self, ids_S: TokenIds, span: Span, parent: _Node | None, last_used: int) -> None:
        self.ids_S, self.span, self.parent, self.last_used = ids_S, span, parent, last_used
        self.children: dict[int, _Node] = {}

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.span)


class PrefixCache:
    """Holds copies: what it returns stays valid only until the next ``insert`` or ``clear``."""

    def __init__(self, max_bytes: int) -> None:
        """
        Args:
            max_bytes: 0 keeps nothing.
        """
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._clock = 0
        self._root = _Node(np.empty(0, np.int64), (), None, 0)

    def match_length(self, ids: TokenIds) -> int:
        """Number of leading tokens that are here. Does not count as use."""
        return sum(length for _, length in self._walk(ids))

    def match(self, ids: TokenIds) -> list[Span]:
        """The longest cached prefix in pieces, in order (views). Counts as use."""
        self._clock += 1
        pieces: list[Span] = []
        for node, length in self._walk(ids):
            node.last_used = self._clock
            pieces.append(tuple(values[..., :length, :] for values in node.span))
        return pieces

    def insert(self, ids: TokenIds, read: Callable[[int, int], Span], bytes_per_token: int) -> None:
        """Keep all of ``ids``; evicts what was used least recently where the budget asks for it.

        Args:
            read: ``read(start, end)`` copies what is kept of those tokens; called at most once.
        """
        self._clock += 1
        node, start = self._root, 0
        for child, length in self._walk(ids):
            if length < len(child.ids_S):
                child = self._split(child, length)
            child.last_used = self._clock
            node, start = child, start + length
        wanted = (len(ids) - start) * bytes_per_token
        if not wanted or wanted > self.max_bytes:
            return
        self._evict(self.max_bytes - wanted)
        if node.parent is None and node is not self._root:
            return  # evicted with the rest: the budget does not hold the whole sequence
        leaf = _Node(ids[start:].copy(), read(start, len(ids)), node, self._clock)
        node.children[int(leaf.ids_S[0])] = leaf
        self.num_bytes += leaf.num_bytes

    def clear(self) -> None:
        self._root.children.clear()
        self.num_bytes = 0

    def _walk(self, ids: TokenIds) -> Iterator[tuple[_Node, int]]:
        """Nodes of the longest match from the top, with the number of tokens that match in each."""
        node, start = self._root, 0
        while start < len(ids) and (child := node.children.get(int(ids[start]))) is not None:
            length = common_length(child.ids_S, ids[start:])
            yield child, length
            if length < len(child.ids_S):
                return
            node, start = child, start + length

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; returns the upper part. Copies, so that each part's memory can be freed alone."""
        assert node.parent is not None
        head = tuple(values[..., :length, :].clone() for values in node.span)
        upper = _Node(node.ids_S[:length].copy(), head, node.parent, node.last_used)
        node.parent.children[int(upper.ids_S[0])] = upper
        node.ids_S = node.ids_S[length:].copy()
        node.span = tuple(values[..., length:, :].clone() for values in node.span)
        node.parent = upper
        upper.children[int(node.ids_S[0])] = node
        return upper

    def _evict(self, target: int) -> None:
        """Drop leaves, least recently used first, until at most ``target`` bytes are kept."""
        while self.num_bytes > target:
            leaf = min(self._leaves(), key=lambda node: node.last_used)
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.ids_S[0])]
            leaf.parent = None
            self.num_bytes -= leaf.num_bytes

    def _leaves(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack += node.children.values()
            else:
                yield node


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Number of leading tokens that two sequences have in common."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
