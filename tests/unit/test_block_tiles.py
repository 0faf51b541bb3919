"""Tiles of an interval mask: exactly those that hold a visible pair; the split of long rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.runtime.attention.block_tiles import build_block_tiles, plan_work


def rows_of(tiles):
    """(columns of partial tiles, columns of full tiles) of every row."""
    ends = tiles.begin_B.tolist()
    return [
        (tiles.columns_E[begin:full].tolist(), tiles.columns_E[full:end].tolist())
        for begin, full, end in zip(ends[:-1], tiles.full_B.tolist(), ends[1:], strict=True)
    ]


def chain(num_tokens):
    return np.arange(num_tokens), np.full(num_tokens, num_tokens)


def test_causal_chain():
    tiles = build_block_tiles(*chain(6), 6, 2, 2)
    assert rows_of(tiles.by_query) == [([0], []), ([1], [0]), ([2], [0, 1])]
    assert rows_of(tiles.by_key) == [([0], [1, 2]), ([1], [2]), ([2], [])]


def test_path_fan_and_a_block_that_the_last_key_leaves_unfilled():
    # Two path keys seen by all; a root of one token; two leaves of two tokens. Keys 0-6, queries 0-4.
    first, last = np.array([0, 0, 0, 1, 2, 3, 4]), np.array([5, 5, 5, 3, 3, 5, 5])
    tiles = build_block_tiles(first, last, 5, 2, 2)
    assert rows_of(tiles.by_query) == [([1], [0]), ([1, 2], [0]), ([1, 2, 3], [0])]
    assert rows_of(tiles.by_key) == [([], [0, 1, 2]), ([0, 1, 2], []), ([1, 2], []), ([2], [])]


def test_gap_between_the_intervals_of_a_key_block_is_skipped():
    # Keys 0 and 1 share a block; queries 2 to 5 see neither, though they lie between.
    tiles = build_block_tiles(np.array([0, 6]), np.array([2, 8]), 8, 2, 2)
    assert rows_of(tiles.by_key) == [([0, 3], [])]


def test_nothing_to_see():
    for first, last, num_queries in (([], [], 3), ([0, 0], [0, 0], 3), ([], [], 0)):
        tiles = build_block_tiles(np.array(first, np.int64), np.array(last, np.int64), num_queries, 2, 2)
        assert tiles.by_query.num_tiles == tiles.by_key.num_tiles == 0
        assert tiles.by_query.num_rows == -(-num_queries // 2) and tiles.by_key.num_rows == -(-len(first) // 2)


@settings(max_examples=40)
@given(st.data())
def test_visited_tiles_are_the_tiles_with_a_visible_pair(data):
    num_queries, num_keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    bounds = st.lists(st.integers(0, num_queries), min_size=num_keys, max_size=num_keys)
    first, last = np.array(data.draw(bounds)), np.array(data.draw(bounds))
    query_block, key_block = data.draw(st.sampled_from([1, 2, 4, 16])), data.draw(st.sampled_from([1, 2, 4, 16]))
    tiles = build_block_tiles(first, last, num_queries, query_block, key_block)

    queries = np.arange(num_queries)[:, None]
    visible = (first <= queries) & (queries < last)
    partial, full = set(), set()
    for row in range(0, num_queries, query_block):
        for column in range(0, num_keys, key_block):
            pairs = visible[row : row + query_block, column : column + key_block]
            if pairs.any():
                fills = pairs.all() and pairs.shape[1] == key_block
                (full if fills else partial).add((row // query_block, column // key_block))
    by_query, by_key = rows_of(tiles.by_query), rows_of(tiles.by_key)
    assert {(row, column) for row, (columns, _) in enumerate(by_query) for column in columns} == partial
    assert {(row, column) for row, (_, columns) in enumerate(by_query) for column in columns} == full
    assert {(row, column) for column, (rows, _) in enumerate(by_key) for row in rows} == partial
    assert {(row, column) for column, (_, rows) in enumerate(by_key) for row in rows} == full


def test_long_path_of_one_query_block_is_cut_evenly():
    # 4 queries, 40 path keys: 10 full tiles in one row; 2 heads on 2 programs: an item takes 5 tiles.
    tiles = build_block_tiles(np.zeros(40, np.int64), np.full(40, 4), 4, 4, 4).by_query
    work = plan_work(tiles, num_heads=2, num_programs=2, min_tiles=2)
    assert work.items.tolist() == [[0, 0, 0, 5, 0], [0, 5, 5, 10, 1]]
    assert work.splits.tolist() == [[0, 0, 2]] and work.num_slots == 2


def test_rows_within_their_share_are_not_cut_and_the_longest_come_first():
    work = plan_work(build_block_tiles(*chain(8), 8, 2, 2).by_query, num_heads=1, num_programs=2, min_tiles=4)
    assert work.items.tolist() == [[3, 6, 7, 10, -1], [2, 3, 4, 6, -1], [1, 1, 2, 3, -1], [0, 0, 1, 1, -1]]
    assert work.splits.shape == (0, 3) and work.num_slots == 0


@settings(max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 6))
def test_items_cover_every_tile_once(counts, num_programs, min_tiles):
    num_queries = 2 * len(counts)
    # Row i sees its own keys alone.
    first = np.repeat(np.arange(len(counts)) * 2, counts)
    tiles = build_block_tiles(first, first + 2, num_queries, 2, 1).by_query
    work = plan_work(tiles, 1, num_programs, min_tiles)
    covered = sorted((begin, end, row) for row, begin, _, end, _ in work.items.tolist() if end > begin)
    assert [begin for begin, _, _ in covered] == [0, *[end for _, end, _ in covered]][: len(covered)]
    assert sum(end - begin for begin, end, _ in covered) == sum(counts)
    for row, low, high in work.splits.tolist():
        slots = sorted(x[4] for x in work.items.tolist() if x[0] == row)
        assert slots == list(range(low, high)) and len(slots) > 1
    lengths = work.items[:, 3] - work.items[:, 1]
    assert (np.diff(lengths) <= 0).all()
