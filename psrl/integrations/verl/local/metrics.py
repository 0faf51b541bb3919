"""veRL's metrics of an update as one mapping of floats per mini-batch."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

_NOT_OF_THE_LOSS = ("perf/", "mfu")


def mini_batch_metrics(output: TensorDict, num_mini_batches: int) -> list[dict[str, float]]:
    """Metrics of every mini-batch of a ``train_mini_batch`` call, without those of the machine (memory, MFU).

    A metric that upstream does not aggregate over micro-batches (``kl_coef``) is averaged over all of them.
    """
    metrics: dict[str, Any] = tu.get(output, "metrics")
    found: list[dict[str, float]] = [{} for _ in range(num_mini_batches)]
    for name, values in metrics.items():
        if name.startswith(_NOT_OF_THE_LOSS):
            continue
        flat = [float(x) for value in values for x in (value if isinstance(value, list) else [value])]
        for index in range(num_mini_batches):
            found[index][name] = flat[index] if len(flat) == num_mini_batches else fmean(flat)
    return found
