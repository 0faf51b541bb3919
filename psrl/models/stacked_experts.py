"""Experts of a layer: transformers stacks them in memory, checkpoints and veRL name a matrix of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def one_by_one(weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors by the names of checkpoints: views, the experts' of what holds all of a layer."""
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".mlp.experts.")
        if not stem:
            yield name, weight
            continue
        for index, matrix in enumerate(weight):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, value in [(kind, matrix)] if kind == "down_proj" else parts:
                yield f"{stem}.mlp.experts.{index}.{part}.weight", value
