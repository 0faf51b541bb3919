"""veRL's PPO loss with a configuration made from a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from psrl.integrations.verl.engine.loss_scope import SEPARABLE_LOSS_MODES, divides_by_padded_width

DRO_BETA = 1.0
"""Weight of dro's quadratic penalty, which has no default upstream."""

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


def make_actor_loss(
    loss_mode: str,
    loss_agg_mode: str,
    *,
    loss_scale_factor: int | None = None,
    entropy_coeff: float = 0.0,
    kl_coef: float = 0.0,
) -> LossFunction:
    """``ppo_loss`` as the trainer binds it; with ``kl_coef`` above 0 the batch needs ``ref_log_prob``."""
    config = ActorConfig(
        strategy="psrl",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        entropy_coeff=entropy_coeff,
        use_kl_loss=kl_coef > 0,
        kl_loss_coef=kl_coef,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=DRO_BETA if loss_mode == "dro" else None),
    )
    return partial(ppo_loss, config)


def depends_on_micro_batches(loss_mode: str, loss_agg_mode: str, loss_scale_factor: int | None) -> bool:
    """Whether upstream's engine gives another loss when it cuts the mini-batch into other micro-batches."""
    return loss_mode not in SEPARABLE_LOSS_MODES or divides_by_padded_width(loss_agg_mode, loss_scale_factor)
