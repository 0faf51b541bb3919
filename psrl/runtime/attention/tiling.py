"""Cuts an interval mask into tiles that dense attention kernels can run, with no pair computed twice or in vain.

- a *triangle*: n keys, each visible to the query at its own place and to every later one of the n queries (causal
  self-attention of a chain of tokens, each the first child of the one before);
- a *rectangle*: keys that are all visible to the same run of queries (a cached path; a chain seen from its other
  descendants).

Example in preorder, a root of two tokens (0, 1) with two children: tokens 2, 3 and token 4::

            key 0  1  2  3  4      triangle   queries 0-3, keys 0-3: the root and its first child
    query 0     x                  triangle   query 4, key 4
          1     x  x               rectangle  query 4, keys 0-1
          2     x  x  x
          3     x  x  x  x
          4     x  x        x

All functions take the keys that some query sees, ascending, and their intervals: ``begin <= query < end``.
Shape legend: V such keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from psrl.types import IntArray

Range = tuple[int, int]


class Triangle(NamedTuple):
    q_start: int
    k_start: int
    length: int


class Rectangle(NamedTuple):
    q_start: int
    q_end: int
    k_start: int
    k_end: int


class Tile(NamedTuple):
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
    """No earlier tile has these queries: its result is stored, not merged."""
    is_new_k: bool
    """No earlier tile has these keys: their gradients are stored, not added."""

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that the tile lets through; a triangle of n has n (n + 1) / 2."""
        num_queries, num_keys = (self.q_end - self.q_start) // self.batch, (self.k_end - self.k_start) // self.batch
        return self.batch * (num_queries * (num_queries + 1) // 2 if self.is_causal else num_queries * num_keys)


def cut_triangles(keys_V: IntArray, begin_V: IntArray, end_V: IntArray) -> tuple[list[Triangle], IntArray]:
    """The triangles of a mask, by key, and the first query of each key that they leave to rectangles.

    A triangle is a run of consecutive keys whose ``begin`` goes up by one and whose ``end`` reaches the run's end.
    """
    if len(keys_V) == 0:
        return [], begin_V
    is_next = np.diff(keys_V) == 1
    starts = np.flatnonzero(np.r_[True, ~(is_next & (np.diff(begin_V) == 1) & (end_V[:-1] > begin_V[1:]))])
    stops = np.r_[starts[1:], len(keys_V)]
    is_cut_short = np.minimum.reduceat(end_V, starts) <= begin_V[stops - 1]
    if is_cut_short.any():  # intervals that do not nest; a tree has none
        starts = np.concatenate(
            [
                _split_run(begin_V, end_V, start, stop) if short else [start]
                for start, stop, short in zip(starts.tolist(), stops.tolist(), is_cut_short.tolist(), strict=True)
            ]
        ).astype(np.int64)
        stops = np.r_[starts[1:], len(keys_V)]

    # A key alone is a triangle (a leaf) only if it sees one query and its neighbours do not see that one alone too.
    is_twin = is_next & (np.diff(begin_V) == 0) & (np.diff(end_V) == 0)
    is_leaf = (end_V - begin_V == 1) & ~np.r_[False, is_twin] & ~np.r_[is_twin, False]
    is_triangle = (stops - starts > 1) | is_leaf[starts]
    starts, lengths = starts[is_triangle], (stops - starts)[is_triangle]

    rest_V = begin_V.copy()
    offsets = np.cumsum(lengths) - lengths
    inside = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
    rest_V[inside] = np.repeat(begin_V[starts] + lengths, lengths)
    triangles = zip(begin_V[starts].tolist(), keys_V[starts].tolist(), lengths.tolist(), strict=True)
    return [Triangle(*values) for values in triangles], rest_V


def _split_run(begin_V: IntArray, end_V: IntArray, start: int, stop: int) -> list[int]:
    """Cut the run [start, stop) greedily wherever a key of the running triangle does not see the next query."""
    begins, ends = begin_V[start:stop].tolist(), end_V[start:stop].tolist()
    starts, lowest_end = [start], ends[0]
    for i in range(1, stop - start):
        if lowest_end <= begins[i]:
            starts.append(start + i)
            lowest_end = ends[i]
        lowest_end = min(lowest_end, ends[i])
    return starts


def cut_rectangles(keys_V: IntArray, begin_V: IntArray, end_V: IntArray) -> list[Rectangle]:
    """Rectangles of a mask, by key; keys whose interval is empty are left out.

    Consecutive keys with the same ``begin`` and falling ``end`` form stairs. Stairs of m distinct ends need m
    rectangles, however they are cut.
    """
    is_left = end_V > begin_V
    keys, begin, end = keys_V[is_left], begin_V[is_left], end_V[is_left]
    if len(keys) == 0:
        return []
    is_next = (np.diff(keys) == 1) & (np.diff(begin) == 0)
    steps = np.flatnonzero(np.r_[True, ~(is_next & (np.diff(end) == 0))])
    is_new_stairs = np.r_[True, ~(is_next & (np.diff(end) <= 0))][steps]
    ends = np.r_[steps[1:], len(keys)] - 1
    first_key, last_key, base, top = keys[steps], keys[ends] + 1, begin[steps], end[steps]
    flights = np.flatnonzero(is_new_stairs)
    rectangles = []
    for low, high in zip(flights.tolist(), [*flights[1:].tolist(), len(steps)], strict=True):
        edges = np.r_[first_key[low], last_key[low:high]]
        rectangles.extend(_cut_stairs(int(base[low]), edges, top[low:high]))
    return rectangles


def _cut_stairs(base: int, edges: IntArray, tops: IntArray) -> Iterator[Rectangle]:
    """Step i: keys [edges[i], edges[i + 1]) are visible to queries [base, tops[i]); tops fall.

    Takes the largest rectangle first, then cuts what is left above and beside it: large tiles keep kernels busy, and
    a query or key lies in about log(steps) of them.
    """
    todo = [(base, 0, len(tops))]
    while todo:
        base, low, high = todo.pop()
        if low == high:
            continue
        best = low + int(((edges[low + 1 : high + 1] - edges[low]) * (tops[low:high] - base)).argmax())
        top = int(tops[best])
        yield Rectangle(base, top, int(edges[low]), int(edges[best + 1]))
        todo += [(top, low, best), (base, best + 1, high)]


def order_tiles(
    triangles: Sequence[Triangle], rectangles: Sequence[Rectangle], num_queries: int, num_keys: int
) -> tuple[tuple[Tile, ...], tuple[Range, ...], tuple[Range, ...]]:
    """Tiles in their fixed order: triangles, then rectangles.

    Returns:
        The tiles; half-open ranges of the queries that are in no tile that ``is_new_q``; the same of keys.
    """
    shapes = _batch_triangles(triangles) + [(*rectangle, False, 1) for rectangle in rectangles]
    seen_q, seen_k = bytearray(num_queries), bytearray(num_keys)
    stored_q, stored_k = bytearray(num_queries), bytearray(num_keys)
    tiles = []
    for q_start, q_end, k_start, k_end, is_causal, batch in shapes:
        is_new_q, is_new_k = seen_q.find(1, q_start, q_end) < 0, seen_k.find(1, k_start, k_end) < 0
        seen_q[q_start:q_end] = ones_q = b"\1" * (q_end - q_start)
        seen_k[k_start:k_end] = ones_k = b"\1" * (k_end - k_start)
        if is_new_q:
            stored_q[q_start:q_end] = ones_q
        if is_new_k:
            stored_k[k_start:k_end] = ones_k
        tiles.append(Tile(q_start, q_end, k_start, k_end, is_causal, batch, is_new_q, is_new_k))
    return tuple(tiles), _zero_ranges(stored_q), _zero_ranges(stored_k)


def _batch_triangles(triangles: Sequence[Triangle]) -> list[tuple[int, int, int, int, bool, int]]:
    """Put neighbouring triangles of equal length into one batch."""
    shapes: list[tuple[int, int, int, int, bool, int]] = []
    last_length = 0
    for q_start, k_start, length in triangles:
        if shapes and length == last_length and shapes[-1][1] == q_start and shapes[-1][3] == k_start:
            first_q, _, first_k, _, _, batch = shapes[-1]
            shapes[-1] = (first_q, q_start + length, first_k, k_start + length, True, batch + 1)
        else:
            shapes.append((q_start, q_start + length, k_start, k_start + length, True, 1))
        last_length = length
    return shapes


def _zero_ranges(flags: bytearray) -> tuple[Range, ...]:
    """Half-open ranges of zero bytes."""
    is_zero = np.frombuffer(flags, dtype=np.uint8) == 0
    edges = np.flatnonzero(np.diff(np.r_[False, is_zero, False].astype(np.int8)))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
