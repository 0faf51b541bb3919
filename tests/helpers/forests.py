"""Rows that repeat each other the way agents' samples do."""

from __future__ import annotations

import random

from tests.helpers.batches import Row


def _with_targets(ids: list[int], mask: list[int], rnd: random.Random, uid: str) -> Row:
    num = sum(mask)
    return Row(ids, mask, [rnd.gauss(0, 1) for _ in range(num)], [rnd.gauss(-5, 0.5) for _ in range(num)], uid=uid)


def step_rows(num_groups: int = 2, num_steps: int = 5, seed: int = 0, vocab: int = 128) -> list[Row]:
    """Step-wise sampling: sample t is the whole history and response t; histories grow by an observation."""
    rnd, rows = random.Random(seed), []
    for group in range(num_groups):
        history = [rnd.randrange(4, vocab) for _ in range(9)]
        for _ in range(num_steps):
            response = [rnd.randrange(4, vocab) for _ in range(rnd.randrange(2, 6))]
            rows.append(
                _with_targets(history + response, [0] * len(history) + [1] * len(response), rnd, f"step{group}")
            )
            history = history + response + [rnd.randrange(4, vocab) for _ in range(rnd.randrange(1, 5))]
    return rows


def tree_rows(depth: int = 3, seed: int = 0, vocab: int = 128) -> list[Row]:
    """Tree sampling: a binary tree of turns; one sample a leaf, observations between turns masked out."""
    rnd, rows = random.Random(seed), []

    def grow(ids: list[int], mask: list[int], left: int) -> None:
        if not left:
            rows.append(_with_targets(ids, mask, rnd, "tree"))
            return
        for _ in range(2):
            num_response, num_tool = rnd.randrange(1, 7), rnd.randrange(0, 4)
            turn = [rnd.randrange(4, vocab) for _ in range(num_response + num_tool)]
            grow(ids + turn, mask + [1] * num_response + [0] * num_tool, left - 1)

    grow([5, 6, 7, 8], [0] * 4, depth)
    return rows


def degenerate_rows(seed: int = 0) -> list[Row]:
    """Duplicates, strict prefixes, rows without targets, and labels that disagree on one source token."""
    rnd = random.Random(seed)
    cases = [
        ([11, 12, 13, 14], [0, 1, 1, 1]),
        ([11, 12, 13, 14], [0, 0, 1, 1]),
        ([11, 12, 13, 14, 15], [0, 1, 0, 1, 1]),
        ([11, 12, 13, 19], [0, 1, 1, 1]),
        ([17, 18], [0, 1]),
        ([11, 12], [0, 1]),
        ([11, 12, 13], [0, 0, 0]),
        ([11, 12, 13, 14], [0, 1, 1, 1]),
    ]
    return [_with_targets(ids, mask, rnd, f"odd{i % 3}") for i, (ids, mask) in enumerate(cases)]


def wide_rows() -> list[Row]:
    """Enough groups that the cache of one is a small part of all of them; 32 rows, as many trees for every share."""
    return [row for seed in range(4) for row in tree_rows(depth=2, seed=seed) + step_rows(1, 4, seed=seed)]


FORESTS = {"step": step_rows, "tree": tree_rows, "degenerate": degenerate_rows}


def value_rows() -> list[Row]:
    """Those of a tree, for a critic."""
    rows = tree_rows()
    for index, row in enumerate(rows):
        num = sum(row.loss_mask)
        row.extra = {"values": [0.1 * index] * num, "returns": [0.3 - 0.2 * t for t in range(num)]}
    return rows
