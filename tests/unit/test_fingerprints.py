"""Fingerprints of prefixes: what rows share, without their tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.placement.fingerprints import TAG, fingerprint_tags, segments_from_fingerprints
from psrl.placement.segments import segments_from_tokens


def rows_of(*rows):
    return [np.asarray(row, dtype=np.int64) for row in rows]


def segments_of(trajectories, stride, padding=0):
    tags = [tag for rows in trajectories for tag in fingerprint_tags(rows, [1] * len(rows), stride)]
    tags += [{"seq_len": 128, "is_padding": True, TAG: tags[0][TAG]}] * padding
    is_padding = np.arange(len(tags)) >= len(tags) - padding
    return segments_from_fingerprints([f"u_{i}_0" for i in range(len(tags))], tags, is_padding)


def work(segments, *rows):
    return round(segments.workload(np.array(rows)))


def test_rows_of_a_trajectory_are_compared_exactly():
    rows = rows_of(range(10), range(13), [*range(7), 99, 98], [*range(7), 99, 97])
    segments = segments_of([rows], stride=1000)
    assert [work(segments, *some) for some in ([0], [1], [0, 1], [0, 2], [2, 3], [0, 1, 2, 3])] == [
        10, 13, 13, 12, 10, 16,
    ]  # fmt: skip


def test_trajectories_are_compared_up_to_the_stride():
    one, two = rows_of(range(10)), rows_of([*range(7), 50, 51, 52])
    assert [work(segments_of([one, two], stride), 0, 1) for stride in (1, 2, 3, 4, 5, 100)] == [13, 14, 14, 16, 15, 19]


def test_hashes_at_different_places_are_one_path():
    """One trajectory forks after 5 tokens, the other after 6. Each has a hash there; both places are on one path."""
    one, two = rows_of(range(10), [*range(5), 70]), rows_of(range(10), [*range(6), 80])
    segments = segments_of([one, two], stride=8)
    assert [work(segments, *some) for some in ([0, 2], [0, 1, 2], [0, 1, 2, 3], [1, 3])] == [10, 11, 12, 8]


def test_padding_rows_have_one_segment_whatever_their_tag_says():
    segments = segments_of([rows_of(range(10))], stride=4, padding=3)
    assert [work(segments, 0), work(segments, 1), work(segments, 1, 2, 3), work(segments, 0, 3)] == [10, 129, 129, 139]


def test_rows_without_fingerprints_are_named():
    tags = [*fingerprint_tags(rows_of([1, 2]), [1], 4), {"seq_len": 2}]
    with pytest.raises(ConfigError, match=r"row b_0_0 \(1 of 2\) has no tag psrl_prefixes.*agent_loop_manager_class"):
        segments_from_fingerprints(["a_0_0", "b_0_0"], tags, np.zeros(2, dtype=bool))


def test_a_tag_is_sixteen_bytes_a_hash():
    (tag,) = fingerprint_tags(rows_of(range(1000)), [990], 100)
    assert len(tag[TAG]) == 16 * 11  # 100, 200, … 900, 990 and 1,000 tokens: 12 bytes each, in base64


tree_rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)


@given(trajectories=st.lists(tree_rows, min_size=1, max_size=4), stride=st.integers(1, 6), seed=st.integers(0, 99))
def test_never_less_work_than_the_tokens_say(trajectories, stride, seed):
    trajectories = [rows_of(*rows) for rows in trajectories]
    exact = segments_from_tokens([row for rows in trajectories for row in rows])
    found = segments_of(trajectories, stride)
    num_rows = len(exact.rows)
    some = np.flatnonzero(np.random.default_rng(seed).integers(0, 2, num_rows))
    assert found.workload(some) >= exact.workload(some) - 1e-9
    if stride == 1:
        assert found.workload(some) == pytest.approx(exact.workload(some))
    first = np.arange(len(trajectories[0]))
    assert segments_of(trajectories[:1], stride).workload(first) == pytest.approx(exact.workload(first))
