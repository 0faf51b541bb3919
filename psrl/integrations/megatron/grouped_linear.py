"""Linear layers of a rank's experts without TransformerEngine, under its parameter names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

from psrl.errors import UnsupportedError


class GroupedLinear(torch.nn.Module):
    """One matrix an expert, as ``TEGroupedLinear``: parameters ``weight0``, ``weight1``, ... of this rank's experts."""

    partition_dim: int
    """Dimension of a weight [out, in] that expert-tensor-parallel ranks split."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise UnsupportedError("add_bias_linear=True: experts with biases need TransformerEngine")
        shape = [output_size, input_size]
        shape[self.partition_dim] = divide(shape[self.partition_dim], pg_collection.expt_tp.size())
        self.num_gemms = num_gemms
        self._groups = pg_collection
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            for index in range(num_gemms):
                device = torch.cuda.current_device()
                weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
                init_method(weight)
                set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
                # Reduced over the data-parallel ranks of the same expert (distributed_data_parallel.py).
                weight.allreduce = config.expert_model_parallel_size == 1
                self.register_parameter(f"weight{index}", weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Experts of all ranks as slices of one tensor, under TransformerEngine's keys.

        As ``TEGroupedLinear._sharded_state_dict_grouped`` (megatron/core/extensions/transformer_engine.py), of which
        this has no extra states. By Megatron-Core's default two ranks would write other experts under equal names,
        which a checkpoint refuses.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        if metadata.get("singleton_local_shards", False):
            raise UnsupportedError("checkpoints of DTensors need TransformerEngine's layers of experts")
        first, num_experts = self._groups.ep.rank() * self.num_gemms, self._groups.ep.size() * self.num_gemms
        found: dict[str, Any] = {}
        for index in range(self.num_gemms):
            (shard,) = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{index}")},
                prefix,
                {"weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), first + index, num_experts)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            shard.replica_id = (*shard.replica_id[:2], self._groups.expt_dp.rank())
            found[f"{prefix}weight{index}"] = shard
        return found

    def forward(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        """Rows of expert 0, then of expert 1, ...; ``m_splits`` says how many each has."""
        parts = torch.split(x, [int(rows) for rows in m_splits])
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)]), None


class ColumnParallelGroupedLinear(GroupedLinear):
    """Stands in for ``TEColumnParallelGroupedLinear``."""

    partition_dim = 0


class RowParallelGroupedLinear(GroupedLinear):
    """Stands in for ``TERowParallelGroupedLinear``."""

    partition_dim = 1
