"""Placement of rows on (mini-batch, rank) cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.placement.orchestrator import Cells, RowKey, evaluate, place_rows, upstream_mini_batches
from psrl.placement.segments import Segments, segments_from_lengths, segments_from_tokens


def steps(uid: str, session: str, num_steps: int, prompt: int = 4, turn: int = 3) -> list[tuple[RowKey, list[int]]]:
    """Rows of a trajectory, each the one before and one more turn; sessions of a uid share the prompt."""
    start = [int(uid)] * prompt
    own = [100 * int(uid) + 10 * int(session) + i for i in range(turn * num_steps)]
    return [(RowKey(uid, session, i), start + own[: turn * (i + 1)]) for i in range(num_steps)]


def forest(*trajectories: tuple[str, str, int]) -> tuple[list[RowKey], list[np.ndarray]]:
    rows = [row for trajectory in trajectories for row in steps(*trajectory)]
    return [key for key, _ in rows], [np.asarray(ids, dtype=np.int64) for _, ids in rows]


def tokens_only(segments: Segments) -> list[float]:
    return [round(float(w)) for w in segments.weight_V]


def no_padding(keys: list[RowKey]) -> np.ndarray:
    return np.zeros(len(keys), dtype=bool)


def place(keys, segments, cells, padding=None, *, grouping="uid", split_groups=False, **options):
    padding = no_padding(keys) if padding is None else padding
    return place_rows(keys, padding, segments, cells, grouping=grouping, split_groups=split_groups, **options)


def test_keys():
    assert RowKey.parse("ab-c_0_11") == RowKey("ab-c", "0", 11)


def test_cells():
    cells = Cells.of(24, 2, 8)
    assert (cells.num_mini_batches, cells.rows_per_cell) == (3, 4)
    assert cells.split(np.arange(24))[1, 0].tolist() == [12, 13, 14, 15]
    with pytest.raises(ConfigError, match="20 rows do not divide"):
        Cells.of(20, 2, 8)


def test_workload_of_tokens_counts_each_prefix_once():
    _, ids = forest(("1", "0", 2), ("1", "1", 1))
    segments = segments_from_tokens(ids)
    # prompt 4; trajectory 0 adds 3 and 3, trajectory 1 adds 3
    assert sorted(tokens_only(segments)) == [3, 3, 3, 4]
    assert [round(segments.workload(np.array(rows))) for rows in ([0], [1], [0, 1], [0, 2], [0, 1, 2])] == [
        7,
        10,
        10,
        10,
        13,
    ]


def test_lengths_estimate_what_tokens_say():
    keys, ids = forest(("1", "0", 3), ("1", "1", 2), ("2", "0", 1))
    tags = [{"prompt_len": len(row) - 3, "seq_len": len(row)} for row in ids]
    exact, estimate = segments_from_tokens(ids), segments_from_lengths(keys, tags, no_padding(keys))
    for rows in ([0], [2], [0, 1, 2], [0, 3], [2, 4], [0, 1, 2, 3, 4], [0, 5], [5]):
        assert estimate.workload(np.array(rows)) == pytest.approx(exact.workload(np.array(rows)))


def test_groups_stay_whole():
    keys, ids = forest(("1", "0", 2), ("2", "0", 2), ("3", "0", 2), ("4", "0", 2))
    shuffled = [0, 2, 4, 6, 1, 3, 5, 7]
    keys, ids = [keys[i] for i in shuffled], [ids[i] for i in shuffled]
    placed = place(keys, segments_from_tokens(ids), Cells.of(8, 2, 4))
    assert placed.num_split_groups == 0
    assert placed.imbalance == pytest.approx(1.0)
    for cell in placed.order_S.reshape(4, 2):
        assert len({keys[row].uid for row in cell}) == 1


def test_a_group_larger_than_a_cell_is_split_at_a_trajectory():
    keys, ids = forest(("1", "0", 2), ("1", "1", 2), ("1", "2", 2), ("1", "3", 2))
    placed = place(keys, segments_from_tokens(ids), Cells.of(8, 2, 8))
    assert placed.num_split_groups == 1
    for cell in placed.order_S.reshape(2, 4):
        assert len({keys[row].session for row in cell}) == 2


def test_cells_of_a_mini_batch_have_similar_work():
    keys, ids = forest(*[(str(g), "0", 1) for g in range(1, 9)])
    ids = [np.resize(row, 10 * (1 + g // 2)) for g, row in enumerate(ids)]  # lengths 10 10 20 20 30 30 40 40
    segments, cells = segments_from_tokens(ids), Cells.of(8, 2, 2)
    naive = evaluate(keys, no_padding(keys), segments, cells, np.arange(8), "uid")
    placed = place(keys, segments, cells)
    assert naive.imbalance > 1.3
    assert placed.imbalance == pytest.approx(1.0)


def test_parts_of_a_group_meet_on_one_rank():
    """Forward-only phases run a rank's rows together, whatever mini-batch they are in."""
    keys, ids = forest(("1", "0", 2), ("1", "1", 2), ("2", "0", 2), ("2", "1", 2))
    placed = place(keys, segments_from_tokens(ids), Cells.of(8, 2, 4))
    for rank in placed.order_S.reshape(2, 4):
        assert len({keys[row].uid for row in rank}) == 1


def test_padding_fills_the_room_that_groups_leave():
    keys, ids = forest(("1", "0", 3), ("2", "0", 3))
    keys += [RowKey("pad", "0", 0), RowKey("pad", "1", 0)]
    ids += [np.ones(8, dtype=np.int64)] * 2
    padding = np.array([False] * 6 + [True] * 2)
    placed = place(keys, segments_from_tokens(ids), Cells.of(8, 2, 8), padding)
    assert placed.num_split_groups == 0
    assert [int(padding[cell].sum()) for cell in placed.order_S.reshape(2, 4)] == [1, 1]


def test_a_split_that_pays():
    """One group has nearly all the work: kept whole, one rank waits."""
    keys, ids = forest(("1", "0", 1), ("1", "1", 1), ("2", "0", 1), ("2", "1", 1))
    ids = [np.resize(row, 100) if key.uid == "1" else row for key, row in zip(keys, ids, strict=True)]
    ids[1] = ids[1] + 5000
    segments, cells = segments_from_tokens(ids), Cells.of(4, 2, 4)
    whole = place(keys, segments, cells)
    split = place(keys, segments, cells, split_groups=True)
    assert (whole.num_split_groups, split.num_split_groups) == (0, 2)
    assert whole.imbalance > 1.8
    assert split.imbalance < 1.1
    assert split.critical_path < whole.critical_path


def test_membership_of_mini_batches_is_kept():
    keys, ids = forest(("1", "0", 4), ("2", "0", 4), ("3", "0", 4), ("4", "0", 4))
    segments, cells = segments_from_tokens(ids), Cells.of(16, 2, 8)
    upstream = np.random.default_rng(0).permutation(16)
    wanted = upstream_mini_batches(upstream, cells)
    placed = place(keys, segments, cells, upstream_S=upstream, keep_mini_batches=True)
    assert [m.tolist() for m in upstream_mini_batches(placed.order_S, cells)] == [m.tolist() for m in wanted]
    before = evaluate(keys, no_padding(keys), segments, cells, upstream, "uid")
    assert placed.workload <= before.workload


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=6),
    num_ranks=st.sampled_from([1, 2, 4]),
    rows_per_cell=st.integers(1, 5),
    grouping=st.sampled_from(["uid", "session", "tokens"]),
    split_groups=st.booleans(),
)
def test_every_row_is_placed_once(sizes, num_ranks, rows_per_cell, grouping, split_groups):
    keys, ids = forest(*[(str(g + 1), str(s), n) for g, (sessions, n) in enumerate(sizes) for s in range(sessions)])
    mini_batch = num_ranks * rows_per_cell
    missing = -len(keys) % mini_batch
    padding = np.array([False] * len(keys) + [True] * missing)
    keys = keys + [RowKey("pad", str(i), 0) for i in range(missing)]
    ids = ids + [np.ones(8, dtype=np.int64)] * missing
    cells = Cells.of(len(keys), num_ranks, mini_batch)
    placed = place(keys, segments_from_tokens(ids), cells, padding, grouping=grouping, split_groups=split_groups)
    assert sorted(placed.order_S.tolist()) == list(range(len(keys)))
    assert placed.imbalance >= 1.0 - 1e-9
