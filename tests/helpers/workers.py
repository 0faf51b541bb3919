"""A worker on a checkpoint, and veRL's losses as the trainer binds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from verl.workers.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss

from psrl.config import PSRLConfig
from psrl.integrations.verl.local.worker import build_training_worker


def make_worker(
    model_dir: str,
    *,
    loss_fn: Callable | None = None,
    psrl: PSRLConfig | None = None,
    dtype: str = "float64",
    max_tokens: int = 1024,
    **kwargs: Any,
) -> TrainingWorker:
    """``build_training_worker`` with test defaults: float64, sharing off unless ``psrl`` is given, vanilla PPO loss.

    Further keywords as there: ``model_type``, ``lr``, ``recompute``, ``forward_only``, ``seed``, ``optimizer``, ...
    """
    worker = build_training_worker(
        model_dir, psrl_config=psrl or PSRLConfig(enable=False), dtype=dtype, max_tokens=max_tokens, **kwargs
    )
    worker.set_loss_fn(loss_fn or ppo_loss_fn())
    return worker


def ppo_loss_fn(
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    *,
    policy: dict[str, Any] | None = None,
    **actor: Any,
) -> Callable:
    """veRL's ``ppo_loss``. ``actor`` and ``policy``: further fields of ``ActorConfig`` and ``PolicyLossConfig``."""
    config = ActorConfig(
        strategy="psrl",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=loss_agg_mode,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(policy or {})),
        **actor,
    )
    return partial(ppo_loss, config)


def value_loss_fn(**critic: Any) -> Callable:
    """veRL's ``value_loss``; rows need ``extra={"values": ..., "returns": ...}``."""
    return partial(value_loss, CriticConfig(strategy="psrl", use_dynamic_bsz=True, **critic))
