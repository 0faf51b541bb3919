"""Advantages of steps and branches."""

import numpy as np
import pytest

from psrl.errors import InputError
from psrl.integrations.verl.trainer.advantage import group_advantages, row_groups, row_returns
from psrl.placement.cells import RowKey

KEYS = [RowKey("a", "0", 0), RowKey("a", "0", 1), RowKey("a", "1", 0), RowKey("a", "1", 1), RowKey("b", "0", 0)]
EXTRA = [
    {"psrl_step": 0, "psrl_state": "s", "psrl_parent": "", "psrl_return": 1.0},
    {"psrl_step": 1, "psrl_state": "t", "psrl_parent": "turn0", "psrl_return": 1.0},
    {"psrl_step": 0, "psrl_state": "s", "psrl_parent": "", "psrl_return": 0.0},
    {"psrl_step": 1, "psrl_state": "s", "psrl_parent": "turn0", "psrl_return": 0.0},
    {"psrl_step": 0, "psrl_state": "s", "psrl_parent": "", "psrl_return": 5.0},
]


@pytest.mark.parametrize(
    ("kind", "anchor", "partition"),
    [
        ("step", "step", [{0, 2}, {1, 3}, {4}]),
        ("step", "state", [{0, 2, 3}, {1}, {4}]),
        ("branch", "step", [{0, 2}, {1}, {3}, {4}]),
    ],
)
def test_groups(kind, anchor, partition):
    groups = row_groups(KEYS, EXTRA, kind, anchor)
    found = [{row for row, group in enumerate(groups) if group == g} for g in dict.fromkeys(groups)]
    assert sorted(found, key=min) == sorted(partition, key=min)


def test_advantages_are_relative_to_the_group():
    returns = row_returns(KEYS, EXTRA)
    groups = row_groups(KEYS, EXTRA, "step", "step")
    assert group_advantages(returns, groups, normalize=False).tolist() == [0.5, 0.5, -0.5, -0.5, 0.0]
    expected = 0.5 / np.sqrt(0.5)
    assert group_advantages(returns, groups, normalize=True) == pytest.approx(
        [expected, expected, -expected, -expected, 0.0], abs=1e-5
    )


def test_equal_returns_teach_nothing():
    assert group_advantages(np.ones(3), ["g"] * 3, normalize=True).tolist() == [0.0, 0.0, 0.0]


def test_a_missing_field_is_named():
    with pytest.raises(InputError, match=r"row a_0_0 has no extra_fields.psrl_return"):
        row_returns(KEYS[:1], [{}])
