"""Gradients of the engine's model under Hugging Face parameter names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from verl.utils.megatron_utils import unwrap_model

from psrl.errors import UnsupportedError
from psrl.integrations.megatron import cpu_device

_PARAM_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def full_grads(engine: Any) -> dict[str, torch.Tensor]:
    """The accumulated gradient (``main_grad``) of every parameter, as transformers names and shapes it.

    Call between ``forward_backward_batch`` and ``optimizer_zero_grad``, before the optimizer step clips in place.
    Tied embeddings have one entry, ``model.embed_tokens.weight``, as ``named_parameters()`` has in transformers.
    The values are veRL's loss's gradient in the dtype of the gradient buffers; the tensors are copies.
    Collective: every rank of the model-parallel group calls it and gets every gradient.

    Raises:
        UnsupportedError: the engine trains adapters, which the checkpoint has no names for.
    """
    if engine.peft_cls is not None:
        raise UnsupportedError("model.lora.rank: gradients of adapters have no names of the checkpoint, set it to 0")
    export = _through_mbridge if engine.vanilla_bridge else _through_megatron_bridge
    with cpu_device.device_mode(), torch.no_grad():
        return {name: grad.clone() for name, grad in export(engine)}


def _through_mbridge(engine: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return engine.bridge.export_weights(
        [_GradientsOf(unwrap_model(chunk), whole_grads(chunk)) for chunk in engine.module]
    )


def _through_megatron_bridge(engine: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """A task names a parameter of this rank and the tensor to convert; one of another pipeline stage has none."""
    whole = {param: grad for chunk in engine.module for param, grad in whole_grads(chunk).items()}
    tasks = [
        dataclasses.replace(task, param_weight=_grad_of(task.param_weight, whole))
        if isinstance(task.param_weight, torch.nn.Parameter)
        else task
        for task in engine.bridge.get_conversion_tasks(engine.module)
    ]
    return engine.bridge.export_hf_weights(engine.module, cpu=False, show_progress=False, conversion_tasks=tasks)


def whole_grads(chunk: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Main gradients that a distributed optimizer has scattered over data-parallel ranks, put together; else none.

    After the reduce-scatter a rank's gradient buffer is valid only in the shard that its optimizer updates
    (megatron/core/distributed/param_and_grad_buffer.py:439).
    """
    grads: dict[torch.nn.Parameter, torch.Tensor] = {}
    if not chunk.ddp_config.use_distributed_optimizer:
        return grads
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group, num_ranks = buffer.data_parallel_group, buffer.data_parallel_world_size
        whole = [torch.empty_like(bucket.grad_data) for bucket in buffer.buckets]
        for out, bucket in zip(whole, buffer.buckets, strict=True):
            shard = bucket.grad_data.chunk(num_ranks)[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(out, shard, group=group)
        for param, (start, end, bucket_id) in buffer.param_index_map.items():
            offset = buffer.buckets[bucket_id].offset
            grads[param] = whole[bucket_id][start - offset : end - offset]
    return grads


class _GradientsOf:
    """A model chunk as the bridge's export sees it, with gradients in place of parameters."""

    def __init__(self, model: Any, whole_grads: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        self._model, self._whole_grads = model, whole_grads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._model.named_parameters():
            yield name, _grad_of(param, self._whole_grads)


def _grad_of(param: Any, whole_grads: dict[torch.nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """In the shape of ``param``, and split over ranks as it is."""
    whole: Any = whole_grads.get(param, param.main_grad)
    grad: Any = whole.view_as(param)
    for attribute in _PARAM_ATTRIBUTES:
        if hasattr(param, attribute):
            setattr(grad, attribute, getattr(param, attribute))
    return grad
