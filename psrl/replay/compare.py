"""How far two sides of a replay are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from psrl.replay.phases import OLD_LOG_PROB, REF, UPDATE, PhaseRun
from psrl.replay.side import SHARED, UNSHARED

TOLERANCES: dict[str, float | None] = {"float64": 1e-9, "float32": 3e-5, "bfloat16": None}
"""Largest relative difference by dtype; None: report only."""

SPLIT_INDEPENDENT_METRICS = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss")
"""Metrics that upstream sums over micro-batches. Others it averages, so they depend on how it cut the mini-batch."""


@dataclass(frozen=True)
class Difference:
    """The worst relative difference of one quantity."""

    quantity: str
    worst: float
    where: str
    """Sample, parameter or metric that has it."""
    tolerance: float | None

    @property
    def is_within(self) -> bool:
        return self.tolerance is None or self.worst <= self.tolerance


def compare_sides(
    runs: Mapping[str, Mapping[str, PhaseRun]],
    cu_targets: list[int],
    *,
    tolerance: float | None,
    with_update: bool,
    all_metrics: bool,
) -> list[Difference]:
    """Differences of log-probs, entropies, gradients of the first mini-batch, and metrics of the first step.

    Args:
        with_update: compare gradients and metrics. False where upstream's loss depends on its micro-batches.
        all_metrics: compare also metrics that depend on them (upstream ran every mini-batch as one micro-batch).
    """
    found: list[Difference] = []
    for phase, key, name in (
        (OLD_LOG_PROB, "log_probs", "old log-probs"),
        (OLD_LOG_PROB, "entropy", "entropies"),
        (REF, "log_probs", "reference log-probs"),
    ):
        ours, theirs = (runs[phase][side].outputs_M[key] for side in (SHARED, UNSHARED))
        found.append(Difference(name, *_worst_sample(ours, theirs, cu_targets), tolerance))
    if with_update:
        ours, theirs = (runs[UPDATE][side].first.gradients or {} for side in (SHARED, UNSHARED))
        found.append(Difference("gradients", *worst_gradient(ours, theirs), tolerance))
        ours, theirs = (runs[UPDATE][side].metrics[:1] for side in (SHARED, UNSHARED))
        found.append(Difference("metrics", *_worst_metric(ours[0], theirs[0], all_metrics), tolerance))
    return found


def _worst_sample(ours_M: Tensor, theirs_M: Tensor, cu_targets: list[int]) -> tuple[float, str]:
    """Absolute difference over 1 + the sample's largest value."""
    worst, where = 0.0, ""
    for sample, (start, end) in enumerate(pairwise(cu_targets)):
        if end == start:
            continue
        ours, theirs = ours_M[start:end].double(), theirs_M[start:end].double()
        error = _number((ours - theirs).abs().max() / (1 + theirs.abs().max()))
        if error >= worst:
            worst, where = error, f"sample {sample}"
    return worst, where


def worst_gradient(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Absolute difference over the tensor's largest value, at least 1e-3 of the largest of all tensors."""
    if ours.keys() != theirs.keys():
        return float("inf"), f"names: {min(ours.keys() ^ theirs.keys())}"
    scale = max(_number(grad.abs().max()) for grad in theirs.values())
    worst, where = 0.0, ""
    for name, grad in theirs.items():
        floor = max(_number(grad.abs().max()), 1e-3 * scale, 1e-30)
        error = _number((ours[name].double() - grad.double()).abs().max() / floor)
        if error >= worst:
            worst, where = error, name
    return worst, where


def _worst_metric(ours: Mapping[str, float], theirs: Mapping[str, float], all_metrics: bool) -> tuple[float, str]:
    worst, where = 0.0, ""
    for name, value in theirs.items():
        if not all_metrics and name not in SPLIT_INDEPENDENT_METRICS:
            continue
        difference = abs(ours.get(name, float("nan")) - value)
        error = _number(torch.tensor(difference / (1 + abs(value)), dtype=torch.float64))
        if error >= worst:
            worst, where = error, name
    return worst, where


def _number(value: Tensor) -> float:
    """NaN counts as the largest error."""
    number = float(value)
    return number if number == number else float("inf")
