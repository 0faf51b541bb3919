"""The interval mask of a micro-batch, cut into blocks that dense attention kernels can run.

Key s is visible to the queries ``first[s] <= q < last[s]``. Two shapes cover any such mask exactly, with no pair
computed twice or in vain:

- a *triangle*: n keys, each visible to the query at its own place and to every later one of the n queries (causal
  self-attention of a chain of tokens, each the first child of the one before);
- a *rectangle*: keys that are all visible to the same run of queries (descendants of a chain outside it; cached path).

Example, a root of two tokens with a child of two tokens and a child of one, in preorder::

            key 0  1  2  3  4      triangle  queries 0-3, keys 0-3  (the chain root, first child)
    query 0     x                  triangle  query 4,     key 4
          1     x  x               rectangle query 4,     keys 0-1
          2     x  x  x
          3     x  x  x  x
          4     x  x        x

Shape legend: T queries, S keys, R runs of keys, B packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from psrl.types import IntArray

Range = tuple[int, int]


class Block(NamedTuple):
    """One kernel call: queries [q_start, q_end) against keys [k_start, k_end).

    ``batch`` > 1 means so many equal triangles side by side: both ranges are split evenly, and part i of the queries
    sees part i of the keys.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    is_causal: bool
    batch: int
    is_new_q: bool
    """No earlier block has these queries: its result is stored, not merged."""
    is_new_k: bool
    """No earlier block has these keys: their gradients are stored, not added."""

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that the mask lets through; a triangle of n has n (n + 1) / 2."""
        num_queries, num_keys = (self.q_end - self.q_start) // self.batch, (self.k_end - self.k_start) // self.batch
        return self.batch * (num_queries * (num_queries + 1) // 2 if self.is_causal else num_queries * num_keys)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Interval mask of one micro-batch and its blocks: built once, used by every layer, forward and backward."""

    first_S: IntArray
    """[S] first query that sees the key."""
    last_S: IntArray
    """[S] one past the last query that sees the key; <= first where no query does."""
    num_queries: int
    visible_pairs: int
    """Number of (query, key) pairs that the mask lets through."""
    blocks: tuple[Block, ...]
    """In the order in which their results are merged."""
    unset_queries: tuple[Range, ...]
    """Half-open ranges of queries whose result no block stores: it starts from zero."""
    unset_keys: tuple[Range, ...]
    """Half-open ranges of keys whose gradients no block stores: they start from zero."""

    @classmethod
    def build(cls, first_S: ArrayLike, last_S: ArrayLike, num_queries: int) -> AttentionLayout:
        """Cut any interval mask into blocks; tree preorder gives about one triangle and one rectangle a tree node.

        Args:
            first_S: [S] integers, first query that sees each key.
            last_S: [S] integers, one past the last query that sees it; at most ``first`` for a key that none sees.
            num_queries: T, at least 0.

        Raises:
            ValueError: shapes differ, values are no integers, or an interval leaves [0, num_queries).
        """
        first, last = _checked(first_S, last_S, num_queries)
        keys = np.flatnonzero(last > first)
        begin, end = first[keys], last[keys]
        triangles, begin = _take_triangles(keys, begin, end)
        rectangles = _rectangles(keys, begin, end)
        blocks, unset_queries, unset_keys = _sequence(triangles, rectangles, num_queries, len(first))
        pairs = int(np.maximum(last - first, 0).sum())
        return cls(first, last, num_queries, pairs, blocks, unset_queries, unset_keys)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: ArrayLike) -> AttentionLayout:
        """Packed independent causal sequences; neighbours of equal length share one kernel call.

        Args:
            cu_seqlens: [B + 1] offsets of the sequences, from 0 to the number of tokens.

        Raises:
            ValueError: the offsets do not start at 0 or decrease.
        """
        offsets = np.asarray(cu_seqlens)
        if offsets.ndim != 1 or len(offsets) == 0 or offsets.dtype.kind not in "iu":
            raise ValueError(f"cu_seqlens must be a vector of B + 1 integers, got {offsets.dtype}{offsets.shape}")
        lengths = np.diff(offsets.astype(np.int64))
        if offsets[0] != 0 or (lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and not decrease, got {offsets.tolist()}")
        num_tokens = int(offsets[-1])
        return cls.build(np.arange(num_tokens), np.repeat(offsets[1:], lengths), num_tokens)

    @property
    def num_keys(self) -> int:
        return len(self.first_S)

    @property
    def num_calls(self) -> int:
        """Kernel calls of one forward pass (and of one backward pass)."""
        return len(self.blocks)

    @property
    def block_pairs(self) -> int:
        """Pairs that the blocks let through, equal to ``visible_pairs``."""
        return sum(block.num_pairs for block in self.blocks)

    @property
    def has_merges(self) -> bool:
        """Whether a query's keys are spread over several blocks."""
        return not all(block.is_new_q for block in self.blocks)


def _checked(first_S: ArrayLike, last_S: ArrayLike, num_queries: int) -> tuple[IntArray, IntArray]:
    first, last = np.asarray(first_S), np.asarray(last_S)
    if first.ndim != 1 or first.shape != last.shape:
        raise ValueError(f"first and last must be vectors of one length, got shapes {first.shape} and {last.shape}")
    if num_queries < 0:
        raise ValueError(f"num_queries must be at least 0, got {num_queries}")
    if len(first) and not (first.dtype.kind in "iu" and last.dtype.kind in "iu"):
        raise ValueError(f"first and last must hold integers, got {first.dtype} and {last.dtype}")
    first, last = first.astype(np.int64), last.astype(np.int64)
    if len(first) and (first.min() < 0 or last.max() > num_queries):
        raise ValueError(
            f"intervals must lie in 0 .. {num_queries} (the queries), got first down to {first.min()} "
            f"and last up to {last.max()}"
        )
    return first, last


def _take_triangles(keys: IntArray, begin: IntArray, end: IntArray) -> tuple[list[Range4], IntArray]:
    """Triangles of the mask, and the first query of each key that they leave.

    A triangle is a run of consecutive keys whose ``begin`` goes up by one and whose ``end`` reaches the run's end.
    """
    if len(keys) == 0:
        return [], begin
    follows = (np.diff(keys) == 1) & (np.diff(begin) == 1) & (end[:-1] > begin[1:])
    starts = np.flatnonzero(np.r_[True, ~follows])
    stops = np.r_[starts[1:], len(keys)]
    is_short = np.minimum.reduceat(end, starts) < begin[stops - 1] + 1
    if is_short.any():
        # Only masks that do not nest have such runs.
        starts = np.concatenate([
            _split_run(begin, end, start, stop) if short else np.array([start])
            for start, stop, short in zip(starts.tolist(), stops.tolist(), is_short.tolist(), strict=True)
        ])
        stops = np.r_[starts[1:], len(keys)]
    # A key alone is left to the rectangles if it sees more than one query or goes together with a neighbour.
    same = (np.diff(keys) == 1) & (np.diff(begin) == 0) & (np.diff(end) == 0)
    alone = (end - begin > 1) | np.r_[False, same] | np.r_[same, False]
    is_triangle = (stops - starts > 1) | ~alone[starts]
    starts, stops = starts[is_triangle], stops[is_triangle]
    lengths = stops - starts
    left = begin.copy()
    inside = np.repeat(starts - np.r_[0, np.cumsum(lengths)[:-1]], lengths) + np.arange(lengths.sum())
    left[inside] = np.repeat(begin[starts] + lengths, lengths)
    return list(zip(begin[starts].tolist(), keys[starts].tolist(), lengths.tolist(), strict=True)), left
