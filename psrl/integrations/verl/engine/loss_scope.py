"""What is known of a loss function: whether it is a sum over samples, and which outputs it reads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
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


class Targets(Enum):
    """Tokens whose outputs a mini-batch needs."""

    LOSS_MASK = "tokens of the loss mask"
    RESPONSE = "tokens of the responses"
    SAMPLE = "all tokens but the first of each sample"


def targets_of(loss_function: Callable[..., Any] | None) -> Targets:
    """Tokens whose outputs a loss may read, or, without a loss, whoever gets the outputs of a forward.

    veRL's own losses read the loss mask. What is handed to a policy loss of the user's, and what veRL takes from a
    forward's outputs, are the responses (``no_padding_2_padding``). A loss function of the user's gets everything.
    """
    if loss_function is None:
        return Targets.RESPONSE
    function = _unbound(loss_function)
    if function is ppo_loss:
        return Targets.LOSS_MASK if _policy_loss_is_upstream(loss_function) else Targets.RESPONSE
    return Targets.LOSS_MASK if function in (sft_loss, value_loss) else Targets.SAMPLE


def _unbound(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    return loss_function.func if isinstance(loss_function, functools.partial) else loss_function


def _policy_loss_is_upstream(loss_function: Callable[..., Any]) -> bool:
    """Whether the policy loss that ``ppo_loss`` looks up is veRL's own; a user's may have any name."""
    if not isinstance(loss_function, functools.partial):
        return False
    mode = _bound_config(loss_function).policy_loss.get("loss_mode", "vanilla")
    return get_policy_loss_fn(mode).__module__.partition(".")[0] == "verl"


def _coupling(loss_function: Callable[..., Any], data: TensorDict) -> str | None:
    """Why the loss couples samples, None if it does not."""
    function = _unbound(loss_function)
    if function is sft_loss:
        return None
    if function not in (ppo_loss, value_loss) or not isinstance(loss_function, functools.partial):
        return f"loss function {getattr(function, '__name__', function)!r} is not known to be a sum over samples"
    config = _bound_config(loss_function)
    if function is ppo_loss:
        mode = config.policy_loss.get("loss_mode", "vanilla")
        if not _policy_loss_is_upstream(loss_function):
            return f"policy loss {mode!r} is not veRL's and not known to be a sum over samples"
        if mode not in SEPARABLE_LOSS_MODES:
            return f"policy loss {mode!r} couples the samples of a mini-batch"
    if divides_by_padded_width(config.loss_agg_mode, config.loss_scale_factor):
        return "loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor divides by the padded width"
    per_sequence = config.loss_agg_mode.startswith("seq-")
    if per_sequence and tu.get_non_tensor_data(data, key="global_batch_size", default=None) is None:
        return f"loss_agg_mode {config.loss_agg_mode} without global_batch_size divides by the rows it sees"
    return None
