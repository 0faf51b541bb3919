"""The interval mask cut into a grid of fixed-size tiles: which (query block, key block) tiles hold a visible pair.

Used by the kernels that walk tiles (Triton, FlexAttention). The lists are exact: a tile is in them if and only if the
mask lets one of its pairs through, and it is *full* if and only if the mask lets all of them through, so that work
follows visible pairs and full tiles need no mask.

Shape legend: S keys, B row blocks, E tiles (entries of a list).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from psrl.types import IntArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TileList:
    """For each row block the column blocks of its tiles, in CSR form: partial tiles first, then full ones."""

    begin_B: Int32Array
    """[B + 1] offsets into ``columns_E``."""
    full_B: Int32Array
    """[B] offset of each row's first full tile; the row's end where it has none."""
    columns_E: Int32Array
    """[E] column blocks, ascending within a row's partial tiles and within its full ones."""

    @property
    def num_rows(self) -> int:
        return len(self.full_B)

    @property
    def num_tiles(self) -> int:
        return len(self.columns_E)


class BlockTiles(NamedTuple):
    """The same tiles by query block (columns are key blocks) and by key block (columns are query blocks)."""

    by_query: TileList
    by_key: TileList


def build_block_tiles(
    first_S: IntArray, last_S: IntArray, num_queries: int, query_block: int, key_block: int
) -> BlockTiles:
    """Tiles of ``query_block`` x ``key_block`` that hold a visible pair, in time linear in keys and tiles.

    Args:
        first_S, last_S: key s is visible to the queries ``first_S[s] <= q < last_S[s]``, as in ``AttentionLayout``.

    Example, blocks of 2 and 2 for a causal chain of 4 tokens: query block 0 sees key block 0 in part, query block 1
    sees key block 1 in part and key block 0 in full. ``by_query`` is ``begin 0 1 3, full 1 2, columns 0 1 0``.
    """
    num_rows, num_columns = -(-num_queries // query_block), -(-len(first_S) // key_block)
    rows_E, columns_E = _tiles(first_S, last_S, num_rows, query_block, key_block)
    lowest_end, highest_begin = _bounds(first_S, last_S, key_block)
    row_end_E = np.minimum((rows_E + 1) * query_block, num_queries)
    is_full_E = (rows_E * query_block >= highest_begin[columns_E]) & (row_end_E <= lowest_end[columns_E])
    return BlockTiles(
        _tile_list(rows_E, columns_E, is_full_E, num_rows), _tile_list(columns_E, rows_E, is_full_E, num_columns)
    )


def _tiles(
    first_S: IntArray, last_S: IntArray, num_rows: int, query_block: int, key_block: int
) -> tuple[IntArray, IntArray]:
    """Query block and key block of every tile: the union, over the keys of a key block, of runs of query blocks."""
    keys = np.flatnonzero(last_S > first_S)
    # A key block's runs live on a line of their own, so one sort and one running maximum serve all of them.
    line = keys // key_block * (num_rows + 1)
    starts = line + first_S[keys] // query_block
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate((line + (last_S[keys] - 1) // query_block + 1)[order])
    if len(keys) == 0:
        return keys, keys
    heads = np.flatnonzero(np.r_[True, starts[1:] > ends[:-1]])
    run_start, run_end = starts[heads], ends[np.r_[heads[1:], len(keys)] - 1]
    lengths = run_end - run_start
    offsets = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(run_start - offsets, lengths)
    return places % (num_rows + 1), places // (num_rows + 1)


def _bounds(first_S: IntArray, last_S: IntArray, key_block: int) -> tuple[IntArray, IntArray]:
    """Per key block: the queries that see all its keys are those from the highest begin to the lowest end.

    A block that the last key leaves unfilled is never full, since kernels must not read beyond it.
    """
    starts = np.arange(0, len(first_S), key_block)
    if len(starts) == 0:
        return starts, starts
    lowest_end, highest_begin = np.minimum.reduceat(last_S, starts), np.maximum.reduceat(first_S, starts)
    if len(first_S) % key_block:
        lowest_end[-1] = -1
    return lowest_end, highest_begin


def _tile_list(rows_E: IntArray, columns_E: IntArray, is_full_E: NDArray[np.bool_], num_rows: int) -> TileList:
    order = np.lexsort((columns_E, is_full_E, rows_E))
    counts = np.bincount(rows_E, minlength=num_rows)
    begin = np.r_[0, np.cumsum(counts)]
    num_full = np.bincount(rows_E[is_full_E], minlength=num_rows)
    return TileList(*(x.astype(np.int32) for x in (begin, begin[1:] - num_full, columns_E[order])))


class WorkList(NamedTuple):
    """What the programs of a launch do, longest item first."""

    items: Int32Array
    """[items, 5]: row block, first tile, first full tile, end of tiles, and the slot of the workspace that takes the
    item's partial result, or -1 for the only item of its row, which writes the result itself."""
    splits: Int32Array
    """[split rows, 3]: row block, first slot, end of slots, whose partial results are added in this order."""

    @property
    def num_slots(self) -> int:
        return int(self.splits[-1, 2]) if len(self.splits) else 0


def plan_work(tiles: TileList, num_heads: int, num_programs: int, min_tiles: int) -> WorkList:
    """One item a row block, or several for a row so long that it would keep one program busy beyond its fair share.

    A few queries against a long path are a handful of rows with many tiles: cut, they fill the device.

    Args:
        num_heads: items are run once a head.
        num_programs: programs that the device runs at a time.
        min_tiles: no item of a cut row gets fewer tiles.
    """
    begin, end = tiles.begin_B[:-1].astype(np.int64), tiles.begin_B[1:].astype(np.int64)
    counts = end - begin
    share = max(-(-tiles.num_tiles * num_heads // (2 * num_programs)), min_tiles)
    parts = np.maximum(counts // share, 1)
    rows = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    item_begin = begin[rows] + counts[rows] * part // parts[rows]
    item_end = begin[rows] + counts[rows] * (part + 1) // parts[rows]
    item_full = np.clip(tiles.full_B[rows], item_begin, item_end)
    is_cut = parts[rows] > 1
    slots = np.where(is_cut, np.cumsum(is_cut) - 1, -1)
    order = np.argsort(item_begin - item_end, kind="stable")
    items = np.stack([rows, item_begin, item_full, item_end, slots], axis=1)[order]
    cut_rows = np.flatnonzero(parts > 1)
    slot_end = np.cumsum(parts[cut_rows])
    splits = np.stack([cut_rows, slot_end - parts[cut_rows], slot_end], axis=1)
    return WorkList(items.astype(np.int32), splits.astype(np.int32))
