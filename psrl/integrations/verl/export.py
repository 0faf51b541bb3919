"""Gradients of the engine's model under Hugging Face parameter names."""

from __future__ import annotations

from collections.abc import Iterator
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
        UnsupportedError: the engine does not use mbridge (``vanilla_mbridge=True``).
    """
    if not engine.vanilla_bridge:
        raise UnsupportedError("vanilla_mbridge=False: gradients are exported through mbridge only, set it to True")
    with cpu_device.device_mode(), torch.no_grad():
        chunks = [_GradientsOf(unwrap_model(chunk), _whole_grads(chunk)) for chunk in engine.module]
        return {name: grad.clone() for name, grad in engine.bridge.export_weights(chunks)}


def _whole_grads(chunk: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
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
            grad: Any = self._whole_grads.get(param, param.main_grad)
            grad = grad.view_as(param)
            for attribute in _PARAM_ATTRIBUTES:
                if hasattr(param, attribute):
                    setattr(grad, attribute, getattr(param, attribute))
            yield name, grad
