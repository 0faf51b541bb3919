"""An expert router for shared prefixes: balancing losses and statistics of the samples, not of the unique tokens.

A token counts as often as samples hold it; padding and dummy micro-batches do not count. Pass 1 changes nothing.

Shape legend: T tokens of a micro-batch on this rank, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    save_to_aux_losses_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from psrl.errors import PlanError
from psrl.integrations.megatron.router_options import uses_statistics
from psrl.runtime.routing import RouterPass
from psrl.runtime.session import layer_execution


class PrefixRouter(TopKRouter):
    """Stands where TopKRouter would, with the same parameters and routes."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        if uses_statistics(self.config):
            router_pass, weights_T = self._pass()
            if router_pass.is_counting and router_pass.loads is not None:
                flat = logits.detach().view(-1, logits.shape[-1])
                map_TX, _ = compute_routing_scores_for_aux_loss(
                    flat, self.topk, self.score_function, fused=self.config.moe_router_fusion
                )
                router_pass.loads.add(self._layer(), weights_T, map_TX)
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
        total = router_pass.num_tokens
        loads_X = router_pass.loads.tokens_per_expert_X[self._layer()].to(scores_for_aux_loss.dtype)
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
        loss = (weights_T.to(squares_T.dtype) * squares_T).sum() * (coeff / router_pass.num_tokens)
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
        if self.config.sequence_parallel:
            weights = weights.chunk(self.tp_group.size())[self.tp_group.rank()]
        return execution.router, weights

    def _layer(self) -> int:
        assert self.layer_number is not None
        return self.layer_number

    def _log(self, name: str, value: Tensor, **groups: Any) -> None:
        save_to_aux_losses_tracker(name, value, self._layer(), self.config.num_layers, **groups)
