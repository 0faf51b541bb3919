"""Adapters of LoRA, split over ranks and put together, by Megatron's names with layers counted over all stages."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from verl.utils.megatron_utils import unwrap_model

from psrl.integrations.verl.engine.export import whole_grads


def fill_adapters(engine: Any) -> None:
    """The same adapters on every layout. A second matrix begins as zeros, which would hide the first one's gradient."""
    with torch.no_grad():
        for name, param in _adapters(engine):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shape = list(param.shape)
            shape[param.partition_dim] *= mpu.get_tensor_model_parallel_world_size()
            whole = 0.2 * torch.randn(shape, generator=generator, dtype=param.dtype)
            param.copy_(_part(name, whole, param.partition_dim))
    engine.optimizer.reload_model_params()


def adapter_grads(engine: Any) -> dict[str, torch.Tensor]:
    """Gradients of all adapters, before the optimizer step. Collective."""
    whole = {param: grad for chunk in engine.module for param, grad in whole_grads(chunk).items()}
    mine = {
        name: _together(name, whole.get(param, param.main_grad).view_as(param), param.partition_dim)
        for name, param in _adapters(engine)
    }
    stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
    torch.distributed.all_gather_object(stages, mine, group=mpu.get_pipeline_model_parallel_group())
    return {name: grad for stage in stages for name, grad in stage.items()}


def _adapters(engine: Any) -> Iterator[tuple[str, Any]]:
    for chunk in map(unwrap_model, engine.module):
        for layer in chunk.decoder.layers:
            for name, param in layer.named_parameters():
                if param.requires_grad:
                    assert ".adapter." in name and param.tensor_model_parallel, name
                    yield f"layers.{layer.layer_number - 1}.{name}", param


def _gated(name: str) -> bool:
    """The gate and the up projection are one matrix, of which a rank has a part of either."""
    return name.endswith("linear_fc1.adapter.linear_out.weight")


def _part(name: str, whole: torch.Tensor, dim: int) -> torch.Tensor:
    num_ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    halves = whole.chunk(2) if _gated(name) else [whole]
    return torch.cat([half.chunk(num_ranks, dim)[rank] for half in halves])


def _together(name: str, part: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=mpu.get_tensor_model_parallel_group())
    if not _gated(name):
        return torch.cat(parts, dim)
    return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves])
