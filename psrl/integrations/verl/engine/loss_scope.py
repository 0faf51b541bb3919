"""Which of veRL's losses are sums over samples, and so can be evaluated sample by sample."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

logger = logging.getLogger(__name__)

SEPARABLE_LOSS_MODES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo"})
"""veRL policy losses that are sums over samples under global normalisers. ``clip_cov`` and ``kl_cov`` rank tokens
over the whole batch, ``geo_mean`` divides by the number of rows it sees, ``bypass_mode`` may normalise over them."""


def resolve_loss_scope(scope: str, loss_function: Callable[..., Any], data: TensorDict) -> str:
    """``sample`` or ``mini_batch``; for ``auto`` the first only where the loss is known to be a sum over samples."""
    if scope != "auto":
        return scope
    reason = _coupling(loss_function, data)
    if reason is None:
        return "sample"
    log_extra_forward(reason)
    return "mini_batch"


@functools.cache
def log_extra_forward(reason: str) -> None:
    """Say, once in this process, why an update takes longer than its two passes."""
    logger.warning("%s: all log-probs are computed in one more forward pass before the update's two passes", reason)


def _bound_config(loss_function: functools.partial[Any]) -> Any:
    """The actor's or critic's configuration, which veRL binds to its loss."""
    return loss_function.keywords.get("config", loss_function.args[0] if loss_function.args else None)


def divides_by_padded_width(loss_agg_mode: str, loss_scale_factor: int | None) -> bool:
    """Whether the aggregation's divisor is the padded width of the rows that it sees."""
    return loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None


def _coupling(loss_function: Callable[..., Any], data: TensorDict) -> str | None:
    """Why the loss couples samples, None if it does not."""
    function = loss_function.func if isinstance(loss_function, functools.partial) else loss_function
    if function is sft_loss:
        return None
    if function not in (ppo_loss, value_loss) or not isinstance(loss_function, functools.partial):
        return f"loss function {getattr(function, '__name__', function)!r} is not known to be a sum over samples"
    config = _bound_config(loss_function)
    if function is ppo_loss:
        mode = config.policy_loss.get("loss_mode", "vanilla")
        if mode not in SEPARABLE_LOSS_MODES:
            return f"policy loss {mode!r} couples the samples of a mini-batch"
    if divides_by_padded_width(config.loss_agg_mode, config.loss_scale_factor):
        return "loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor divides by the padded width"
    per_sequence = config.loss_agg_mode.startswith("seq-")
    if per_sequence and tu.get_non_tensor_data(data, key="global_batch_size", default=None) is None:
        return f"loss_agg_mode {config.loss_agg_mode} without global_batch_size divides by the rows it sees"
    return None
