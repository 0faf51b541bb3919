"""The interval mask of a micro-batch, built once and used by every layer, forward and backward.

Shape legend: T queries, S keys, B packed sequences.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from psrl.runtime.attention.tiling import Range, Tile, cut_rectangles, cut_triangles, order_tiles
from psrl.types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Key s is visible to the queries ``first_S[s] <= q < last_S[s]``; the same mask as tiles for dense kernels."""

    first_S: IntArray
    last_S: IntArray
    num_queries: int
    visible_pairs: int
    """Number of (query, key) pairs that the mask lets through."""
    is_constant: bool
    """No query sees two keys: each weight is 1, whatever q and k are."""
    tiles: tuple[Tile, ...]
    """In the order in which their results are merged."""
    unset_queries: tuple[Range, ...]
    """Half-open ranges of queries whose result no tile stores: it starts from zero."""
    unset_keys: tuple[Range, ...]
    """Half-open ranges of keys whose gradients no tile stores: they start from zero."""
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    """What a backend made of the mask for one device, kept for the other layers: the one part that changes."""

    @classmethod
    def build(cls, first_S: ArrayLike, last_S: ArrayLike, num_queries: int) -> AttentionLayout:
        """Cut any interval mask into tiles. Tree preorder gives about one triangle and one rectangle a tree node.

        Args:
            first_S: [S] integers, first query that sees each key, at least 0.
            last_S: [S] integers, one past the last such query; at most ``first_S`` for a key that no query sees.
            num_queries: T, at least 0.

        Raises:
            ValueError: the lengths differ, values are not integers, or an interval leaves the queries.
        """
        first, last = _checked(first_S, last_S, num_queries)
        keys = np.flatnonzero(last > first)
        begin, end = first[keys], last[keys]
        triangles, begin_rest = cut_triangles(keys, begin, end)
        rectangles = cut_rectangles(keys, begin_rest, end)
        tiles, unset_queries, unset_keys = order_tiles(triangles, rectangles, num_queries, len(first))
        return cls(
            first_S=first,
            last_S=last,
            num_queries=num_queries,
            visible_pairs=int((end - begin).sum()),
            is_constant=_most_keys(begin, end, num_queries) <= 1,
            tiles=tiles,
            unset_queries=unset_queries,
            unset_keys=unset_keys,
        )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: ArrayLike) -> AttentionLayout:
        """Packed independent causal sequences; neighbours of equal length share a kernel call.

        Args:
            cu_seqlens: [B + 1] integer offsets of the sequences, from 0 to the number of tokens.

        Raises:
            ValueError: the offsets are not integers, do not start at 0, or fall.
        """
        offsets = np.asarray(cu_seqlens)
        if offsets.ndim != 1 or len(offsets) == 0 or offsets.dtype.kind not in "iu":
            raise ValueError(f"cu_seqlens must hold B + 1 integers, got shape {offsets.shape} of {offsets.dtype}")
        lengths = np.diff(offsets.astype(np.int64))
        if offsets[0] != 0 or (lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, got {offsets.tolist()}")
        num_tokens = int(offsets[-1])
        return cls.build(np.arange(num_tokens), np.repeat(offsets[1:], lengths), num_tokens)

    @property
    def num_keys(self) -> int:
        return len(self.first_S)

    @property
    def num_calls(self) -> int:
        """Kernel calls of a forward pass, and of a backward pass."""
        return len(self.tiles)

    @property
    def tile_pairs(self) -> int:
        """Pairs that the tiles let through; always equal to ``visible_pairs``."""
        return sum(tile.num_pairs for tile in self.tiles)

    @property
    def is_single_call(self) -> bool:
        """Whether one tile is the whole mask: its results need no merging and no copy."""
        return len(self.tiles) == 1 and not self.unset_queries and not self.unset_keys

    @property
    def has_merges(self) -> bool:
        """Whether the keys of some query lie in several tiles."""
        return not all(tile.is_new_q for tile in self.tiles)


def _most_keys(begin_V: IntArray, end_V: IntArray, num_queries: int) -> int:
    """Most keys that one query sees."""
    starting, ending = (np.bincount(x, minlength=num_queries + 1) for x in (begin_V, end_V))
    return int(np.cumsum(starting - ending).max())


def _checked(first_S: ArrayLike, last_S: ArrayLike, num_queries: int) -> tuple[IntArray, IntArray]:
    first, last = np.asarray(first_S), np.asarray(last_S)
    if first.ndim != 1 or first.shape != last.shape:
        raise ValueError(f"first and last must be vectors of one length, got shapes {first.shape} and {last.shape}")
    if num_queries < 0:
        raise ValueError(f"num_queries must be at least 0, got {num_queries}")
    if len(first) and (first.dtype.kind not in "iu" or last.dtype.kind not in "iu"):
        raise ValueError(f"first and last must hold integers, got {first.dtype} and {last.dtype}")
    first, last = first.astype(np.int64), last.astype(np.int64)
    if len(first) and (first.min() < 0 or last.max() > num_queries):
        raise ValueError(
            f"first must be at least 0 and last at most the number of queries ({num_queries}), "
            f"got {first.min()} and {last.max()}"
        )
    return first, last
