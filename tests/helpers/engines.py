"""One mini-batch through an engine, and everything it yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.workers.engine_workers import TrainingWorker

from psrl.integrations.verl.engine.export import full_grads
from tests.helpers.batches import Row, batch_tensordict


@dataclass
class Outcome:
    model_output: dict[str, list[torch.Tensor]]
    """By kind, per row: one value per target."""
    loss: float
    metrics: dict[str, Any]
    grads: dict[str, torch.Tensor]
    report: Any


def at_targets(values: torch.Tensor, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Values of a jagged [rows, tokens] output at each target's source token."""
    return [
        value[:-1][torch.tensor(row.loss_mask[1:], dtype=torch.bool)]
        for value, row in zip(values.unbind(), rows, strict=True)
    ]


def run_update(
    worker: TrainingWorker,
    rows: Sequence[Row],
    loss_fn: Callable,
    *,
    max_tokens: int,
    dtype: torch.dtype = torch.float64,
    **batch: Any,
) -> Outcome:
    """Forward and backward of one mini-batch, without an optimizer step."""
    engine = worker.engine
    data = batch_tensordict(rows, dtype=dtype, max_tokens=max_tokens, **batch)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, loss_fn, forward_only=False)
        grads = full_grads(engine)
    return _outcome(engine, output, rows, grads)


def run_inference(
    worker: TrainingWorker, rows: Sequence[Row], *, max_tokens: int, dtype: torch.dtype = torch.float64, **batch: Any
) -> Outcome:
    """Forward only, without a loss."""
    engine = worker.engine
    data = batch_tensordict(rows, dtype=dtype, max_tokens=max_tokens, **batch)
    with engine.eval_mode():
        output = engine.infer_batch(data)
    return _outcome(engine, output, rows, {})


def _outcome(engine: Any, output: dict[str, Any], rows: Sequence[Row], grads: dict[str, torch.Tensor]) -> Outcome:
    return Outcome(
        model_output={kind: at_targets(values, rows) for kind, values in output["model_output"].items()},
        loss=float(sum(output["loss"])),
        metrics=output["metrics"],
        grads=grads,
        report=getattr(engine, "last_report", None),
    )
