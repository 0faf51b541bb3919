"""An expert router for shared prefixes: balancing losses and statistics of the samples, not of the unique tokens.

A token counts as often as samples hold it; padding and dummy micro-batches do not count. Pass 1 changes nothing.
Routes are replayed and recorded by unique token, see ``runtime/routes.py``.

Shape legend: T tokens of a micro-batch on this rank, X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    save_to_aux_losses_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from psrl.errors import PlanError
from psrl.integrations.megatron.router_options import replays_routes, uses_statistics
from psrl.runtime.routing import RouterPass
from psrl.runtime.session import layer_execution

_ROUTING = TopKRouter.routing
"""Megatron-Core's. An engine with router replay replaces it for the whole process by a copy that counts experts' tokens
for biases without asking ``_apply_expert_bias`` (verl/utils/megatron/router_replay_patch.py, ``patched_routing``)."""


class PrefixRouter(TopKRouter):
    """Stands where TopKRouter would, with the same parameters and, unless they are replayed, the same routes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if replays_routes(self.config):
            self.router_replay = RouteExchange(self)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = _ROUTING(self, logits, padding_mask)
        if uses_statistics(self.config):
            router_pass, weights_T = self._pass()
            if router_pass.is_counting and router_pass.loads is not None:
                flat = logits.detach().view(-1, logits.shape[-1])
                map_TX, _ = compute_routing_scores_for_aux_loss(
                    flat, self.topk, self.score_function, fused=self.config.moe_router_fusion
                )
                router_pass.loads.add(self.layer(), weights_T, map_TX)
        return probs, routing_map

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """``coeff x X / (topk T^2) sum_x load_x sum_t weight_t score_tx``, this rank's tokens' part of it."""
        coeff = self.get_aux_loss_coeff("aux_loss")
        if coeff == 0:
            return probs
        router_pass, weights_T = self._pass()
        assert router_pass.loads is not None
        total = max(1, router_pass.num_tokens)  # a rank without rows has only weights of 0
        loads_X = router_pass.loads.of(self.layer(), scores_for_aux_loss.shape[-1], scores_for_aux_loss.device)
        loads_X = loads_X.to(scores_for_aux_loss.dtype)
        per_expert_X = weights_T.to(scores_for_aux_loss.dtype) @ scores_for_aux_loss
        loss = (loads_X * per_expert_X).sum() * (coeff * len(loads_X) / (self.topk * total * total))
        self._log("load_balancing_loss", loss / coeff, reduce_group=self.tp_cp_group)
        return MoEAuxLossAutoScaler.apply(probs, loss * router_pass.loss_scale)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """``coeff / T sum_t weight_t logsumexp(logits_t)^2``, this rank's tokens' part of it."""
        coeff = self.config.moe_z_loss_coeff
        if not coeff or not self.training or not torch.is_grad_enabled():
            return logits
        router_pass, weights_T = self._pass()
        squares_T = torch.logsumexp(logits, dim=-1).square()
        loss = (weights_T.to(squares_T.dtype) * squares_T).sum() * (coeff / max(1, router_pass.num_tokens))
        self._log("z_loss", loss / coeff)
        return MoEAuxLossAutoScaler.apply(logits, loss * router_pass.loss_scale)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if not self.enable_expert_bias or not torch.is_grad_enabled():
            return
        _, weights_T = self._pass()
        assert self.local_tokens_per_expert is not None
        with torch.no_grad():
            counts_X = weights_T.to(torch.float64) @ routing_map.to(torch.float64)
            self.local_tokens_per_expert += counts_X.to(self.local_tokens_per_expert.dtype)

    def _pass(self) -> tuple[RouterPass, Tensor]:
        """How this micro-batch is treated, and the weights [T] of this rank's tokens."""
        execution = layer_execution()
        weights = execution.micro_batch.token_weights_T
        if execution.router is None or weights is None:
            raise PlanError("a router with losses or statistics was called without the samples' token counts")
        return execution.router, self.own(weights)

    def own(self, values_T: Tensor) -> Tensor:
        """Of one value for each of the rank's tokens, those that this router sees."""
        if self.config.sequence_parallel:
            return values_T.chunk(self.tp_group.size())[self.tp_group.rank()]
        return values_T

    def layer(self) -> int:
        """Number of its layer, from 1."""
        assert self.layer_number is not None
        return self.layer_number

    def _log(self, name: str, value: Tensor, **groups: Any) -> None:
        save_to_aux_losses_tracker(name, value, self.layer(), self.config.num_layers, **groups)


class RouteExchange:
    """Stands where Megatron-Core's RouterReplay would: which experts a layer's tokens go to, for one router.

    The micro-batch is that of the attention before it, so a recomputed forward replays what the first one did.
    """

    def __init__(self, router: PrefixRouter) -> None:
        self._router = router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, K] of the chosen experts and the experts [T, K], from scores [T, X].

        Args:
            default_compute_topk: the router's own choice.
        """
        assert default_compute_topk is not None
        native_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        execution = layer_execution()
        routes, unique = execution.routes, execution.micro_batch.unique_T
        if routes is None or unique is None:
            return native_TK
        layer, unique_T = self._router.layer(), self._router.own(unique)
        if routes.is_recording:
            routes.add(layer, unique_T, native_TK[1])
            return native_TK
        replayed_TK = routes.of(layer, unique_T)
        experts_TK = torch.where(replayed_TK < 0, native_TK[1], replayed_TK)
        return scores.gather(1, experts_TK), experts_TK


def expert_layers(chunks: Iterable[nn.Module]) -> tuple[int, ...]:
    """Numbers of the layers, from 1, that have a router, in the model chunks of this rank."""
    return tuple(m.layer() for chunk in chunks for m in chunk.modules() if isinstance(m, PrefixRouter))
