"""veRL's training worker, which begins to plan what it is given before its engine is switched to it.

Upstream loads offloaded weights and optimizer, and asks the data-parallel ranks for their token numbers, between the
call of a worker and the first pass. A thread plans meanwhile. The worker hands a forward-only phase its whole batch in
one call, so that there is no next batch to plan while one runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from psrl.integrations.verl.engine.plan_ahead import forward_planned, updates_planned

_DISPATCH: dict[str, Any] = {
    "dispatch_mode": make_nd_compute_dataproto_dispatch_fn(mesh_name="train"),
    "blocking": False,
}
"""As upstream registers these methods (verl/workers/engine_workers.py:242 and :397)."""


class PlanningWorker(TrainingWorker):
    engine: Any
    """psrl's, sharing or not."""
    loss_fn: Any

    @register(**_DISPATCH)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        planner = self.engine.planner
        with updates_planned(planner, self.loss_fn) if planner else contextlib.nullcontext():
            return super().train_mini_batch(data)

    @register(**_DISPATCH)
    def infer_batch(self, data: TensorDict) -> TensorDict:
        planner = self.engine.planner
        has_loss = tu.get(data, key="compute_loss", default=True)  # as upstream's infer_batch
        loss_function = self.loss_fn if has_loss else None
        with forward_planned(planner, data, loss_function) if planner else contextlib.nullcontext():
            return super().infer_batch(data)
