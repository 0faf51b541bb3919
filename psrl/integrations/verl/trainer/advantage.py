"""Advantages of steps and branches, from what agent loops write into ``extra_fields``.

veRL compares whole trajectories and gives every row of one the same advantage. Here a row is also compared with the
rows that had the same choice to make.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from psrl.errors import InputError
from psrl.placement.cells import RowKey
from psrl.types import FloatArray

EPSILON = 1e-6


def row_groups(
    keys: Sequence[RowKey], extra_fields: Sequence[Mapping[str, Any]], kind: str, anchor: str
) -> list[Hashable]:
    """What each row is compared within.

    Args:
        kind: ``step``: rows of a prompt at the same step. ``branch``: rows of a prompt that continue the same turn
            (those that continue the task's prompt, of all trajectories).
        anchor: of ``step``: the number of the step, or the state before it.

    Raises:
        InputError: the agent loop does not write the field; names it.
    """
    groups: list[Hashable] = []
    for key, extra in zip(keys, extra_fields, strict=True):
        if kind == "step":
            groups.append((key.uid, _field(extra, "psrl_step" if anchor == "step" else "psrl_state", key)))
        else:
            parent = _field(extra, "psrl_parent", key)
            groups.append((key.uid, key.session, parent) if parent else (key.uid, "", ""))
    return groups


def row_returns(keys: Sequence[RowKey], extra_fields: Sequence[Mapping[str, Any]]) -> FloatArray:
    """[S] ``psrl_return`` of the rows.

    Raises:
        InputError: a row has none.
    """
    return np.array(
        [float(_field(e, "psrl_return", key)) for key, e in zip(keys, extra_fields, strict=True)], dtype=np.float64
    )


def group_advantages(returns_S: FloatArray, groups: Sequence[Hashable], *, normalize: bool) -> FloatArray:
    """[S] returns minus the mean of their group, over its standard deviation if ``normalize``; 0 in a group of one."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    advantages = np.zeros(len(returns_S))
    for rows in members.values():
        values = returns_S[rows]
        if len(rows) > 1:
            spread = values.std(ddof=1) + EPSILON if normalize else 1.0
            advantages[rows] = (values - values.mean()) / spread
    return advantages


def _field(extra: Mapping[str, Any], name: str, key: RowKey) -> Any:
    value = extra.get(name)
    if value is None:
        raise InputError(
            f"row {'_'.join(map(str, key))} has no extra_fields.{name}, which psrl.advantage needs: use an agent loop "
            "of psrl.agents, or set psrl.advantage=grpo"
        )
    return value
