"""Expert routes for rows: a function of the prefix, so that they agree where prefixes do, unless told otherwise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch

from tests.helpers.batches import Row


def routed_rows(
    rows: Sequence[Row], *, layers: int, parts_at: int | None = None, experts: int = 4, topk: int = 2
) -> list[Row]:
    """The rows with random routes, equal for equal prefixes.

    Args:
        parts_at: every second row goes its own way from this token on, in the last layer only.
    """

    def route(prefix: list[int], own: int) -> list[list[int]]:
        return [
            random.Random(f"{prefix} {layer} {own if layer == layers - 1 else 0}").sample(range(experts), topk)
            for layer in range(layers)
        ]

    routed = []
    for index, row in enumerate(rows):
        ids = row.input_ids
        parts = parts_at if index % 2 and parts_at is not None else len(ids)
        experts_TLK = [route(ids[: t + 1], index if t >= parts else 0) for t in range(len(ids))]
        routed.append(dataclasses.replace(row, routed_experts=torch.tensor(experts_TLK, dtype=torch.int16)))
    return routed


def without_routes(rows: Sequence[Row]) -> list[Row]:
    return [dataclasses.replace(row, routed_experts=None) for row in rows]
