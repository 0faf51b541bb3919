"""The prefix tree against a token-by-token trie, and its literal layout."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import InputError
from psrl.tree import build_tree, token_keys
from psrl.types import SampleBatch


def batch_of(rows, positions=None, extra=None):
    batch = SampleBatch.from_lists(rows, [[0] * len(r) for r in rows], positions)
    if extra is not None:
        object.__setattr__(batch, "extra_inputs_NK", np.asarray(extra).reshape(-1, 1))
    return batch


rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=10)


@settings(max_examples=300, deadline=None)
@given(rows_of_tokens)
def test_equals_a_trie(rows):
    tree = build_tree(batch_of(rows))
    prefixes = {tuple(r[: i + 1]) for r in rows for i in range(len(r))}
    assert tree.num_tokens == len(prefixes)
    spelled = {tuple(tree.token_ids_U[tree.ancestors(t)].tolist()) for t in range(tree.num_tokens)}
    assert spelled == prefixes
    start = 0
    for row in rows:
        index = tree.index_N[start : start + len(row)].tolist()
        assert tree.ancestors(index[-1]).tolist() == index
        assert tree.depth_U[index].tolist() == list(range(len(row)))
        assert tree.parent_U[index].tolist() == [-1, *index[:-1]]
        start += len(row)
    for token in range(tree.num_tokens):
        below = [t for t in range(tree.num_tokens) if token in tree.ancestors(t)]
        assert below == list(range(token, tree.end_U[token]))


def test_layout_puts_the_largest_subtree_first():
    tree = build_tree(batch_of([[1, 2], [1, 3, 4, 5], [1, 3, 6]]))
    assert tree.token_ids_U.tolist() == [1, 3, 4, 5, 6, 2]
    assert tree.parent_U.tolist() == [-1, 0, 1, 2, 1, 0]
    assert tree.end_U.tolist() == [6, 5, 4, 4, 5, 6]
    assert tree.index_N.tolist() == [0, 5, 0, 1, 2, 3, 0, 1, 4]


def test_does_not_depend_on_the_order_of_samples():
    rows = [[1, 2, 3], [1, 2, 4, 4], [5], [1, 9]]
    a, b = build_tree(batch_of(rows)), build_tree(batch_of(rows[::-1]))
    assert a.token_ids_U.tolist() == b.token_ids_U.tolist() and a.parent_U.tolist() == b.parent_U.tolist()


def test_positions_and_extra_inputs_keep_tokens_apart():
    rows = [[1, 2], [1, 2]]
    assert build_tree(batch_of(rows)).num_tokens == 2
    assert build_tree(batch_of(rows, positions=[[0, 1], [0, 2]])).num_tokens == 3
    assert build_tree(batch_of(rows, extra=[7, 7, 7, 8])).num_tokens == 3
    assert build_tree(batch_of(rows, extra=[7, 7, 8, 7])).num_tokens == 4


def test_out_of_range_ids_are_refused():
    with pytest.raises(InputError, match="a token id is out of range"):
        token_keys(batch_of([[-1, 2]]))
    with pytest.raises(InputError, match="a position is out of range"):
        token_keys(batch_of([[1, 2]], positions=[[0, 1 << 40]]))


def test_a_million_tokens_in_under_a_second():
    """1,000 samples of 1,000 tokens: step-wise histories. The fastest of three, in processor time, since a busy
    machine is not a failure; far below the bound."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(50):
        trunk = [1000 + group, *rng.integers(0, 500, 1899).tolist()]
        rows += [trunk[: 95 * (t + 1)] + rng.integers(500, 1000, 50).tolist() for t in range(20)]
    batch = batch_of(rows)
    assert batch.num_tokens > 1_000_000
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        tree = build_tree(batch)
        seconds.append(time.thread_time() - start)
    assert tree.num_tokens == 50 * 1900 + 1000 * 50
    assert min(seconds) < 1.0
