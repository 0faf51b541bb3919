"""Which experts a model's routers sent tokens to: what router replay (R3) trains with.

Shape legend: B rows of a forward pass, Q tokens a row, E layers with experts, K experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from psrl.errors import UnsupportedError


class RouteCollector:
    """Keeps what every router chose in the last forward pass of the model."""

    def __init__(self, model: Any) -> None:
        """
        Raises:
            UnsupportedError: the model has no routers.
        """
        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        if not routers:
            raise UnsupportedError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True, but the model has no experts: set it to "
                "False"
            )
        self.size = (len(routers), routers[0].top_k)
        """E and K."""
        self._chosen: list[Tensor] = [torch.empty(0)] * len(routers)
        for index, router in enumerate(routers):
            router.register_forward_hook(partial(self._keep, index))

    def _keep(self, index: int, _module: Any, _inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[index] = outputs[2]

    def take(self, shape_BQ: torch.Size) -> Tensor:
        """[E, B, Q, K] int16."""
        return torch.stack([experts.view(*shape_BQ, -1).short() for experts in self._chosen])
