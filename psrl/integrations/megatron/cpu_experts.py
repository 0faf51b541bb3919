"""What mixtures of experts need on the CPU beyond ``cpu_device``. Installed by it; nothing where CUDA is available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.integrations.megatron.hooks import HookSet

HOOKS = HookSet()


@HOOKS.add(
    cause="the router's matrix product asks whether TransformerEngine's is there by a name that is bound only with "
    "TransformerEngine; split sizes that are on the CPU already stay tensors, and gloo's all-to-all wants integers",
    upstream="megatron/core/transformer/moe/moe_utils.py:1192 (RouterGatingLinearFunction), :1078 "
    "(maybe_move_tensor_to_cpu), used in megatron/core/transformer/moe/token_dispatcher.py:876",
    remove_when="the name is always bound, and tensors on the CPU become arrays too",
)
def router_without_transformer_engine() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


@HOOKS.add(
    cause="experts that are split over tensor-parallel ranks gather parts of different lengths, which gloo refuses",
    upstream="megatron/core/tensor_parallel/mappings.py:150 (_gather_along_first_dim), :202 "
    "(_reduce_scatter_along_first_dim)",
    remove_when="gloo's all_gather and reduce_scatter take parts of different lengths",
)
def uneven_gathers() -> None:
    from megatron.core.tensor_parallel import mappings

    upstream_gather, upstream_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or output_split_sizes is None:
            return upstream_gather(input_, group, None, use_global_buffer)
        parts = [input_.new_empty((int(size), *input_.shape[1:])) for size in output_split_sizes]
        parts[group.rank()] = input_.detach().contiguous()
        for rank, part in enumerate(parts):
            dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group)
        return torch.cat(parts)

    def reduce_scatter(
        input_: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or input_split_sizes is None:
            return upstream_scatter(input_, group, None, use_global_buffer)
        total = input_.detach().clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter
