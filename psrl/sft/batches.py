"""The order in which samples are trained on: whole sessions together, since their samples repeat each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.data import ReplaySample


def epoch_batches(samples: Sequence[ReplaySample], batch: int, seed: int, epoch: int) -> list[list[ReplaySample]]:
    """Every sample once, in batches of ``batch``, the last of which may be smaller.

    Sessions are shuffled, by seed and epoch; the samples of one stay together and in order.
    """
    sessions: dict[str, list[ReplaySample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session or sample.where, []).append(sample)
    shuffled = list(sessions.values())
    np.random.default_rng([seed, epoch]).shuffle(shuffled)  # pyright: ignore[reportArgumentType]
    ordered = [sample for session in shuffled for sample in session]
    return [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
