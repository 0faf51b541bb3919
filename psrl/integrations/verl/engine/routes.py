"""Router replay as veRL asks for it: routes that come with a batch (R2, R3), and routes that are recorded for one (R2).

Shape legend: N tokens of all samples, S samples, L layers that have experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from psrl.errors import InputError
from psrl.integrations.megatron.router_options import expert_layer_numbers
from psrl.routes import ExpertArray, SampleRoutes, number_routes
from psrl.types import BoolArray, IntArray, SampleBatch

FIELD = "routed_experts"
"""Jagged [S, tokens, L, K]; of a rollout also with the dense layers, whose entries mean nothing."""


@dataclass(frozen=True)
class RouteTask:
    """What an engine does about routes in one mini-batch."""

    experts: Tensor | None = None
    """``FIELD``, where it is replayed."""
    is_rollout: bool = False
    """R3: rollouts have no route for the last token, which nothing depends on; the router decides there."""
    is_recording: bool = False


def take_routes(data: TensorDict, mode: str, *, forward_only: bool) -> tuple[TensorDict, RouteTask]:
    """The batch without its routes, which no loss reads, and what to do about them.

    As upstream's ``forward_backward_batch``: nothing unless the batch says ``enable_routing_replay``; an R2 forward
    without routes records them, everything else replays.

    Args:
        mode: ``router_replay.mode`` of the engine.

    Raises:
        InputError: routes are to be replayed, but there are none.
    """
    experts = data.get(FIELD, None)
    if experts is not None:
        data = data.exclude(FIELD)
    if mode == "disabled" or not tu.get_non_tensor_data(data, key="enable_routing_replay", default=False):
        return data, RouteTask()
    if experts is None:
        if mode == "R2" and forward_only:
            return data, RouteTask(is_recording=True)
        source = "the old log-prob forward records them" if mode == "R2" else "the rollout has to return them"
        raise InputError(f"router_replay.mode={mode}: the batch has no {FIELD}; {source}")
    return data, RouteTask(experts, is_rollout=mode == "R3")


def replayed_routes(task: RouteTask, data: TensorDict, samples: SampleBatch, config: Any) -> SampleRoutes | None:
    """Routes of the samples' tokens, None where nothing is replayed.

    Args:
        config: Megatron-Core's ``TransformerConfig``.

    Raises:
        InputError: the routes are not those of the samples' tokens and the model's layers; names what differs.
    """
    if task.experts is None:
        return None
    if not task.experts.is_nested:
        raise InputError(f"{FIELD} must be jagged, got {tuple(task.experts.shape)}")
    experts_NLK = _of_expert_layers(_aligned(task, samples), config)
    is_replayed_N = _replay_mask(data, samples) if task.is_rollout else np.ones(samples.num_tokens, dtype=bool)
    routes = number_routes(experts_NLK, is_replayed_N)
    bad_R = ((routes.table_RLK < 0) | (routes.table_RLK >= config.num_moe_experts)).any(axis=(1, 2))
    if bad_R.any():
        position = int(np.argmax(np.isin(routes.ids_N, np.flatnonzero(bad_R))))
        sample = int(np.searchsorted(samples.cu_seqlens, position, side="right")) - 1
        raise InputError(
            f"{FIELD}: token {position - samples.cu_seqlens[sample]} of sample {sample} goes to an expert that is none "
            f"of the model's {config.num_moe_experts}"
        )
    return routes


def _of_expert_layers(experts_NLK: ExpertArray, config: Any) -> ExpertArray:
    """As upstream tells them apart: routes have as many layers as the model, or as it has with experts."""
    layers = expert_layer_numbers(config)
    num_layers, topk = experts_NLK.shape[1:]
    if num_layers not in (len(layers), config.num_layers) or topk != config.moe_router_topk:
        raise InputError(
            f"{FIELD} has {num_layers} layers of {topk} experts a token, the model {len(layers)} of "
            f"{config.moe_router_topk}"
        )
    return experts_NLK if num_layers == len(layers) else experts_NLK[:, [layer - 1 for layer in layers]]


def _aligned(task: RouteTask, samples: SampleBatch) -> ExpertArray:
    """[N, L, K]; of a rollout, a row of zeros where the last token's is missing."""
    assert task.experts is not None
    values = task.experts.values().cpu().numpy().astype(np.int16, copy=False)
    offsets: Any = task.experts.offsets()  # pyright: ignore[reportAttributeAccessIssue]  # no public type
    lengths, seqlens = offsets.diff().cpu().numpy().astype(np.int64), samples.seqlens_S
    if len(lengths) != len(seqlens):
        raise InputError(f"{FIELD} has {len(lengths)} rows for {len(seqlens)} samples")
    wrong = (lengths != seqlens) & ((lengths != seqlens - 1) | (not task.is_rollout))
    if wrong.any():
        sample = int(np.argmax(wrong))
        raise InputError(f"sample {sample}: {FIELD} has {lengths[sample]} tokens, input_ids {seqlens[sample]}")
    if (lengths == seqlens).all():
        return values
    aligned = np.zeros((samples.num_tokens, *values.shape[1:]), dtype=np.int16)
    starts = np.cumsum(lengths) - lengths
    aligned[np.arange(len(values)) + np.repeat(samples.cu_seqlens[:-1] - starts, lengths)] = values
    return aligned


def _replay_mask(data: TensorDict, samples: SampleBatch) -> BoolArray:
    """[N] all but the last token of samples with a response, none of others (upstream's ``build_r3_replay_mask``)."""
    response_mask = data["response_mask"]
    rows = response_mask.unbind() if response_mask.is_nested else response_mask
    has_response_S = np.asarray([bool((row > 0).any()) for row in rows])
    is_replayed_N = np.repeat(has_response_S, samples.seqlens_S)
    is_replayed_N[samples.cu_seqlens[1:] - 1] = False
    return is_replayed_N


def sample_experts(experts_ULK: Tensor, index_N: IntArray, cu_seqlens: IntArray) -> Tensor:
    """``FIELD`` as upstream records it: int16 on the host, every sample with all of its tokens.

    Args:
        index_N: unique token of every token.
    """
    values_NLK = experts_ULK[torch.from_numpy(index_N)]
    return torch.nested.nested_tensor_from_jagged(values_NLK, offsets=torch.from_numpy(cu_seqlens))
