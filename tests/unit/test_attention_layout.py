"""Interval masks cut into tiles: literal tiles, and exact cover of any mask.

Shape legend: T queries, S keys.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.runtime.attention import AttentionLayout
from psrl.runtime.attention.tiling import Tile


def triangle(q_start, q_end, k_start, k_end, batch=1, is_new_q=True, is_new_k=True):
    return Tile(q_start, q_end, k_start, k_end, True, batch, is_new_q, is_new_k)


def rectangle(q_start, q_end, k_start, k_end, is_new_q=False, is_new_k=False):
    return Tile(q_start, q_end, k_start, k_end, False, 1, is_new_q, is_new_k)


def dense_mask(first_S, last_S, num_queries):
    query_T1 = np.arange(num_queries)[:, None]
    return (np.asarray(first_S) <= query_T1) & (query_T1 < np.asarray(last_S))


def times_covered(layout):
    """[T, S] how often the tiles compute each pair; also checks the flags that say which results are stored."""
    count_TS = np.zeros((layout.num_queries, layout.num_keys), dtype=int)
    times_stored = {"q": np.zeros(layout.num_queries, dtype=int), "k": np.zeros(layout.num_keys, dtype=int)}
    times_used = {name: count.copy() for name, count in times_stored.items()}
    for tile in layout.tiles:
        ranges = {"q": slice(tile.q_start, tile.q_end), "k": slice(tile.k_start, tile.k_end)}
        for name, is_new in (("q", tile.is_new_q), ("k", tile.is_new_k)):
            assert is_new == (times_used[name][ranges[name]] == 0).all()
            times_used[name][ranges[name]] += 1
            times_stored[name][ranges[name]] += is_new
        num_queries = (tile.q_end - tile.q_start) // tile.batch
        num_keys = (tile.k_end - tile.k_start) // tile.batch
        block = np.tri(num_queries, dtype=int) if tile.is_causal else np.ones((num_queries, num_keys), dtype=int)
        count_TS[ranges["q"], ranges["k"]] += np.kron(np.eye(tile.batch, dtype=int), block)
    for name, ranges in (("q", layout.unset_queries), ("k", layout.unset_keys)):
        for start, end in ranges:
            times_stored[name][start:end] += 1
        assert (times_stored[name] == 1).all()
    return count_TS


def assert_exact(first_S, last_S, num_queries):
    layout = AttentionLayout.build(first_S, last_S, num_queries)
    mask_TS = dense_mask(first_S, last_S, num_queries)
    np.testing.assert_array_equal(times_covered(layout), mask_TS)
    assert layout.tile_pairs == layout.visible_pairs == mask_TS.sum()
    assert layout.is_constant == (mask_TS.sum(axis=1) <= 1).all()
    return layout


def preorder(tree):
    """first, last of a tree given as (length, [children])."""
    last = []

    def visit(node):
        length, children = node
        start = len(last)
        last.extend([0] * length)
        for child in children:
            visit(child)
        last[start : start + length] = [len(last)] * length

    visit(tree)
    return list(range(len(last))), last


def test_one_sequence_is_one_call():
    layout = assert_exact(range(5), [5] * 5, 5)
    assert layout.tiles == (triangle(0, 5, 0, 5),)
    assert layout.is_single_call and not layout.has_merges and layout.visible_pairs == 15


def test_root_with_two_children():
    layout = assert_exact(*preorder((2, [(2, []), (1, [])])), 5)
    assert layout.tiles == (triangle(0, 4, 0, 4), triangle(4, 5, 4, 5), rectangle(4, 5, 0, 2))
    assert layout.num_calls == 3 and layout.has_merges and not layout.is_single_call


def test_cached_path_of_a_chain():
    layout = assert_exact([0, 0, 0, *range(4)], [4, 4, 4] + [4] * 4, 4)
    assert layout.tiles == (triangle(0, 4, 3, 7), rectangle(0, 4, 0, 3, is_new_k=True))


def test_path_tokens_with_fewer_readers_form_stairs():
    # Path tokens 0-3 see all six queries, 4 the first four, 5 none: stairs of two steps.
    layout = assert_exact([0] * 6 + list(range(6)), [6, 6, 6, 6, 4, 0, 4, 4, 4, 4, 6, 6], 6)
    assert layout.tiles == (
        triangle(0, 4, 6, 10),
        triangle(4, 6, 10, 12),
        rectangle(0, 6, 0, 4, is_new_k=True),
        rectangle(0, 4, 4, 5, is_new_k=True),
    )
    assert layout.unset_keys == ((5, 6),) and layout.unset_queries == ()


def test_equal_leaves_share_one_call():
    layout = assert_exact(*preorder((10, [(4, [])] * 64)), 266)
    # The root and its first leaf are one chain; the other leaves one batch; they all read the root.
    assert layout.tiles == (
        triangle(0, 14, 0, 14),
        triangle(14, 266, 14, 266, batch=63),
        rectangle(14, 266, 0, 10),
    )


def test_comb_needs_one_triangle_and_one_rectangle_a_leaf():
    # Steps of a trajectory: each history node continues, and drops a leaf that is read once.
    tree = (3, [])
    for _ in range(20):
        tree = (5, [tree, (2 + _ % 2, [])])
    first, last = preorder(tree)
    layout = assert_exact(first, last, len(first))
    assert layout.num_calls == 1 + 20 + 20


def test_stairs_take_the_largest_rectangle_first():
    layout = assert_exact([0] * 6, [9, 9, 8, 3, 3, 1], 9)
    assert [tile[:4] for tile in layout.tiles] == [(0, 1, 5, 6), (0, 8, 0, 3), (0, 3, 3, 5), (8, 9, 0, 2)]


def test_packed_sequences():
    layout = AttentionLayout.from_cu_seqlens([0, 3, 3, 6, 9, 11])
    assert layout.tiles == (triangle(0, 9, 0, 9, batch=3), triangle(9, 11, 9, 11))
    assert layout.visible_pairs == 21
    np.testing.assert_array_equal(layout.last_S, [3, 3, 3, 6, 6, 6, 9, 9, 9, 11, 11])
    assert AttentionLayout.from_cu_seqlens([0, 7]).is_single_call
    assert AttentionLayout.from_cu_seqlens(np.array([0])).tiles == ()


def test_intervals_that_are_no_tree():
    band = assert_exact(range(10), [min(i + 3, 10) for i in range(10)], 10)
    assert band.num_calls < 20
    assert_exact([3, 0, 2, 2, 5], [4, 6, 2, 0, 6], 6)
    assert_exact([0, 1, 2, 0, 1, 2], [3, 3, 3, 3, 3, 3], 3)
    assert_exact([1, 2], [2, 3], 5)


def test_nothing_to_see():
    for num_queries, num_keys in ((0, 0), (4, 0), (0, 3), (4, 3)):
        layout = assert_exact([0] * num_keys, [0] * num_keys, num_queries)
        assert layout.tiles == () and layout.visible_pairs == 0


@st.composite
def forests(draw):
    """Cached path, then a preorder forest, as (first, last, number of queries)."""
    num_tokens = draw(st.integers(1, 40))
    ancestors, parents = [], []
    for token in range(num_tokens):
        go_up = draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5, 40]))
        ancestors = ancestors[: max(0, len(ancestors) - go_up)]
        parents.append(ancestors[-1] if ancestors else -1)
        ancestors.append(token)
    last = list(range(1, num_tokens + 1))
    for token in reversed(range(num_tokens)):
        if parents[token] >= 0:
            last[parents[token]] = max(last[parents[token]], last[token])
    path = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=12)), reverse=True)
    return [0] * len(path) + list(range(num_tokens)), path + last, num_tokens


@given(forests())
def test_forests_are_covered_exactly(forest):
    first, last, num_queries = forest
    layout = assert_exact(first, last, num_queries)
    local_last = last[len(first) - num_queries :]
    num_leaves = sum(end == token + 1 for token, end in enumerate(local_last))
    num_path_steps = len(set(last[: len(first) - num_queries]) - {0})
    # A chain ends in each leaf; each of the others hangs off one place of an earlier chain.
    assert layout.num_calls <= 2 * num_leaves + num_path_steps


@given(
    st.integers(0, 12).flatmap(
        lambda t: st.tuples(st.just(t), st.lists(st.tuples(st.integers(0, t), st.integers(0, t))))
    )
)
def test_any_intervals_are_covered_exactly(case):
    num_queries, intervals = case
    assert_exact([a for a, _ in intervals], [b for _, b in intervals], num_queries)


@pytest.mark.parametrize(
    ("first", "last", "num_queries", "message"),
    [
        ([0, 1], [3, 4], 3, r"number of queries \(3\), got 0 and 4"),
        ([-1, 1], [3, 3], 3, "got -1 and 3"),
        ([0, 1], [3], 3, r"one length, got shapes \(2,\) and \(1,\)"),
        ([0.0, 1.0], [3.0, 3.0], 3, "must hold integers, got float64"),
        ([0], [0], -1, "num_queries must be at least 0, got -1"),
    ],
)
def test_bad_intervals(first, last, num_queries, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayout.build(first, last, num_queries)


@pytest.mark.parametrize("cu_seqlens", [[], [1, 2], [0, 3, 2], [0.0, 2.0], [[0, 1]]])
def test_bad_cu_seqlens(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        AttentionLayout.from_cu_seqlens(cu_seqlens)
