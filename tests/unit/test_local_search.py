"""The parts of a placement: depth-first order, starts, schedule and search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.placement.cells import Cells, RowKey
from psrl.placement.local_search import Grid, LocalSearch
from psrl.placement.orchestrator import evaluate, place_rows
from psrl.placement.prefix_order import PrefixOrder
from psrl.placement.schedule import by_work, schedule
from psrl.placement.segments import segments_from_tokens
from psrl.placement.starts import cheapest_cuts

rows_strategy = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=10), min_size=1, max_size=12)


def rows_of(rows):
    return [np.asarray(row, dtype=np.int64) for row in rows]


@given(rows=rows_strategy, seed=st.integers(0, 999))
def test_work_in_depth_first_order_is_that_of_the_segments(rows, seed):
    segments = segments_from_tokens(rows_of(rows))
    rng = np.random.default_rng(seed)
    order = PrefixOrder.of(segments, rng.integers(0, 4, len(rows)))
    assert order.row_P[order.place_S].tolist() == list(range(len(rows)))
    some = np.flatnonzero(rng.integers(0, 2, len(rows)))
    assert order.workload(np.sort(order.place_S[some])) == pytest.approx(segments.workload(some))


def test_groups_are_consecutive_where_prefixes_allow():
    rows = rows_of([[1, 5], [1, 6], [1, 7], [1, 8]])
    order = PrefixOrder.of(segments_from_tokens(rows), np.array([0, 1, 0, 1]))
    assert order.row_P.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("cost", "limit", "bounds"),
    [
        ([5, 1, 5], 4, [0, 4]),  # fits
        ([5, 1, 5], 2, [0, 2, 4]),
        ([1, 5, 9, 9], 3, [0, 2, 5]),  # 1 alone would leave a run of four
        ([3, 3, 3, 3, 3], 2, [0, 2, 4, 6]),  # of equal costs the fewest runs
        ([1, 2, 3, 4, 5, 6], 3, [0, 1, 4, 7]),  # a trajectory: cut early, where its rows are short
    ],
)
def test_groups_are_cut_where_they_share_least(cost, limit, bounds):
    assert cheapest_cuts(np.asarray(cost, dtype=float), limit) == bounds


def test_cells_of_one_work_run_together():
    segments = segments_from_tokens(rows_of([[1] * 4, [2] * 30, [3] * 31, [4] * 5]))
    columns = by_work([np.array([row]) for row in range(4)], segments, 2)
    assert [[int(cell[0]) for cell in column] for column in columns] == [[2, 1], [3, 0]]


def test_cells_that_share_run_on_one_rank():
    segments = segments_from_tokens(rows_of([[1] * 9 + [2], [5] * 9 + [2], [5] * 9 + [3], [1] * 9 + [3]]))
    columns = [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
    placed = schedule(columns, segments, may_regroup=False, limit=np.inf)
    assert placed[:, :, 0].tolist() == [[0, 3], [1, 2]]


def test_one_exchange_of_a_whole_group_for_another():
    """Cells of work 5 + 5 and 1 + 1 of four groups of two rows: two groups change places."""
    lengths = [50, 50, 10, 10]
    rows = rows_of([[g + 1] * n + [i] for g, n in enumerate(lengths) for i in (7, 8)])
    segments = segments_from_tokens(rows)
    group_S = np.repeat(np.arange(4), 2)
    order = PrefixOrder.of(segments, group_S)
    grid = Grid.of(order, [[np.arange(4), np.arange(4, 8)]])
    assert grid.load_MR.round().tolist() == [[104, 24]]
    search = LocalSearch(order, group_S[order.row_P], may_split=False, across=True)
    improved = search.improve(grid, 10)
    assert improved.load_MR.round().tolist() == [[64, 64]]
    for cell in improved.columns(order)[0]:
        assert len(set(group_S[cell].tolist())) == 2


def test_nothing_is_split_for_nothing():
    """Exchanging single rows would balance no better and compute prefixes twice."""
    rows = rows_of([[g] * 20 + [i] for g in range(1, 5) for i in range(4)])
    keys = [RowKey(str(g), str(i), 0) for g in range(1, 5) for i in range(4)]
    shuffled = np.random.default_rng(3).permutation(16)
    placed = place_rows(
        keys, np.zeros(16, dtype=bool), segments_from_tokens(rows), Cells.of(16, 2, 8),
        grouping="uid", split_groups=True, upstream_S=shuffled,
    )  # fmt: skip
    assert placed.num_split_groups == 0
    assert placed.imbalance == pytest.approx(1.0)
    assert placed.workload == pytest.approx(4 * segments_from_tokens(rows).workload(np.arange(4)))


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 2), min_size=1, max_size=12)), min_size=1,
                  max_size=24),
    num_ranks=st.sampled_from([1, 2, 4]),
    rows_per_cell=st.integers(1, 6),
    keep_mini_batches=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_permutation_never_slower_than_upstream(rows, num_ranks, rows_per_cell, keep_mini_batches, seed):
    missing = -len(rows) % (num_ranks * rows_per_cell)
    keys = [RowKey(str(group), str(index), 0) for index, (group, _) in enumerate(rows)]
    keys += [RowKey("pad", str(index), 0) for index in range(missing)]
    padding = np.arange(len(keys)) >= len(rows)
    segments = segments_from_tokens(rows_of([ids for _, ids in rows] + [[0] * 3] * missing))
    cells = Cells.of(len(keys), num_ranks, num_ranks * rows_per_cell)
    upstream = np.random.default_rng(seed).permutation(len(keys))
    placed = place_rows(
        keys, padding, segments, cells,
        grouping="uid", split_groups=True, upstream_S=upstream, keep_mini_batches=keep_mini_batches,
    )  # fmt: skip
    before = evaluate(keys, padding, segments, cells, upstream, "uid")
    assert sorted(placed.order_S.tolist()) == list(range(len(keys)))
    assert placed.critical_path <= before.critical_path * (1 + 1e-9)
    if keep_mini_batches:
        grids = [cells.split(order).transpose(1, 0, 2) for order in (placed.order_S, upstream)]
        for mine, theirs in zip(*grids, strict=True):
            assert sorted(mine.ravel().tolist()) == sorted(theirs.ravel().tolist())
