"""Semantic groups and their placement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.grouping import effective_workload, place_groups, select_samples, semantic_groups
from psrl.types import SampleBatch


def count_tokens(tokens, pairs, rows):
    return float(tokens)


def batch_of(rows, groups):
    return SampleBatch.from_lists(rows, [[0] + [1] * (len(r) - 1) for r in rows], group_ids=groups)


def test_workload_counts_shared_prefixes_once():
    batch = batch_of([[1, 2, 3], [1, 2, 4], [7, 8]], [5, 5, 6])
    groups = semantic_groups(batch, effective_workload(batch, count_tokens))
    assert [(g.group_id, g.samples.tolist(), g.workload) for g in groups] == [(5, [0, 1], 4.0), (6, [2], 2.0)]


def test_workload_has_tokens_pairs_and_rows():
    batch = batch_of([[1, 2, 3], [1, 2, 4]], [0, 0])
    seen = []
    effective_workload(batch, lambda *work: seen.append(work) or 0.0)(np.asarray([0, 1]))
    assert seen == [(4, 1 + 2 + 3 + 3, 2)]


def test_groups_stay_whole_and_balance():
    """Four groups of two samples on two cells: the heaviest with the lightest."""
    lengths = [40, 30, 20, 10]
    rows = [[100 * g + 1] * n for g, n in enumerate(lengths) for _ in range(2)]
    batch = batch_of(rows, [g for g in range(4) for _ in range(2)])
    workload = effective_workload(batch, count_tokens)
    placed = place_groups(semantic_groups(batch, workload), 2, workload)
    assert [c.tolist() for c in placed.cells] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert placed.workloads.tolist() == [50.0, 50.0] and placed.imbalance == 1.0 and placed.num_split_groups == 0


def test_a_group_larger_than_a_cell_is_split():
    batch = batch_of([[1, 2, i] for i in range(6)] + [[9], [8]], [0] * 6 + [1, 2])
    workload = effective_workload(batch, count_tokens)
    placed = place_groups(semantic_groups(batch, workload), 2, workload)
    assert sorted(len(c) for c in placed.cells) == [4, 4] and placed.num_split_groups == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 4))
def test_every_sample_is_placed_once_in_equal_cells(groups, num_cells):
    groups = groups[: len(groups) // num_cells * num_cells] or [0] * num_cells
    batch = batch_of([[g, i] for i, g in enumerate(groups)], groups)
    workload = effective_workload(batch, count_tokens)
    placed = place_groups(semantic_groups(batch, workload), num_cells, workload)
    assert sorted(np.concatenate(placed.cells).tolist()) == list(range(len(groups)))
    assert {len(c) for c in placed.cells} == {len(groups) // num_cells}


def test_selecting_samples_keeps_every_field():
    batch = SampleBatch.from_lists([[1, 2], [3, 4, 5]], [[0, 1], [0, 0, 1]], [[0, 1], [4, 5, 6]], [7, 8], [1.0, 0.5])
    chosen = select_samples(batch, np.asarray([1]))
    assert chosen.token_ids_N.tolist() == [3, 4, 5] and chosen.position_ids_N.tolist() == [4, 5, 6]
    assert chosen.target_mask_N.tolist() == [False, False, True] and chosen.group_ids_S.tolist() == [8]
    assert chosen.temperatures_S.tolist() == [0.5] and chosen.cu_seqlens.tolist() == [0, 3]


def test_uneven_rows_are_refused():
    with pytest.raises(ConfigError, match="3 samples do not divide over 2 cells"):
        batch = batch_of([[1], [2], [3]], [0, 1, 2])
        workload = effective_workload(batch, count_tokens)
        place_groups(semantic_groups(batch, workload), 2, workload)
