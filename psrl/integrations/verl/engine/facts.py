"""What a mini-batch's plans and its run have to know of an engine whose model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from psrl.config import PSRLConfig
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import ConfigError
from psrl.integrations.megatron.budget import agreed_budget
from psrl.integrations.megatron.host_tier import host_tier
from psrl.integrations.megatron.passes import context_rank, token_multiple
from psrl.integrations.megatron.router_options import needs_loads, uses_statistics
from psrl.integrations.megatron.shape import cached_values
from psrl.runtime.attention import KEEPING_BACKENDS
from psrl.runtime.routes import TokenRoutes
from psrl.runtime.session import RouterSamples, Session
from psrl.systems import PSRL, System
from psrl.tiers import HostTier
from psrl.types import ExecutionPlan


class PlanOptions(TypedDict):
    """Arguments of ``build_plan``, apart from the samples."""

    max_tokens: int
    shape: ModelShape
    footprint: KVFootprint
    forward_only: bool
    system: System
    host: HostTier | None
    recompute: bool


@dataclass(frozen=True)
class EngineFacts:
    """One engine, on this rank. Data only; methods derive plans' options and sessions from it."""

    settings: PSRLConfig
    system: System
    """psrl, or one to compare it with."""
    megatron: Any
    """``TransformerConfig``, which declares as optional the sizes that it fills in itself."""
    shape: ModelShape
    is_value_model: bool
    param_dtype: torch.dtype
    device: torch.device
    chunk_layers: tuple[int, ...]
    """Attention layers of each model chunk of this rank."""
    expert_layers: tuple[int, ...]
    """Numbers, from 1, of this rank's layers with experts."""
    attention_backend: str
    path_in_place: bool
    """Attention reads the cached path in its blocks."""
    use_dynamic_bsz: bool
    max_token_len_per_gpu: int | None
    infer_max_token_len_per_gpu: int | None
    use_fused_kernels: bool
    router_replay_mode: str

    @property
    def output_dtype(self) -> torch.dtype:
        return torch.float64 if self.param_dtype == torch.float64 else torch.float32

    @property
    def has_layers(self) -> bool:
        """Whether this pipeline stage has attention layers; one without still plans, as if it had one."""
        return any(self.chunk_layers)

    @property
    def planned_layers(self) -> int:
        return max(1, sum(self.chunk_layers))

    @property
    def has_router_statistics(self) -> bool:
        """Whether expert routers have losses or statistics, which depend on how often a token is counted."""
        return bool(self.megatron.num_moe_experts) and uses_statistics(self.megatron)

    @property
    def needs_router_loads(self) -> bool:
        """Whether an update begins with a forward over all tokens that counts every expert's load."""
        return bool(self.megatron.num_moe_experts) and needs_loads(self.megatron)

    @property
    def keeps_attention(self) -> bool:
        """Whether an update may keep attention's results of the spine between its passes."""
        is_wanted = self.settings.keep_attention and self.system.keeps_attention
        return is_wanted and self.attention_backend in KEEPING_BACKENDS

    def max_tokens(self, data: TensorDict, *, forward_only: bool) -> int:
        """Tokens of a micro-batch of all context-parallel ranks; budgets are of one rank, as upstream's are.

        Raises:
            ConfigError: nothing says how many.
        """
        name = "infer_max_tokens" if forward_only else "max_tokens"
        budget = getattr(self.settings, name)
        # What an update's batch does not say, upstream takes from the engine (engine_workers.py, train_batch).
        if budget is None and tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=self.use_dynamic_bsz):
            budget = tu.get_non_tensor_data(data, key="max_token_len_per_gpu", default=self.max_token_len_per_gpu)
        if budget is None:
            raise ConfigError(f"psrl.{name} is needed: the engine gives no token budget (use_dynamic_bsz=false)")
        return int(budget) * mpu.get_context_parallel_world_size()

    def cache_budget(self) -> int | None:
        """Bytes that this rank's cache may take from now on; None: no limit. Collective over ranks that share plans."""
        return agreed_budget(self._own_budget(), self.planned_layers, self.device)

    def _own_budget(self) -> int | None:
        """None on every rank, or on none."""
        if self.settings.kv_cache_bytes is not None:
            return self.settings.kv_cache_bytes
        if not torch.cuda.is_available():
            return None
        return int(torch.cuda.mem_get_info()[0] * self.settings.kv_cache_fraction)

    def plan_options(self, max_tokens: int, budget: int | None, *, forward_only: bool) -> PlanOptions:
        """Ranks with equal samples (tensor, pipeline, context parallel) get equal options, and so equal plans.

        Args:
            budget: most bytes of this rank's cache.
        """
        tensor_parallel, itemsize = mpu.get_tensor_model_parallel_world_size(), self.param_dtype.itemsize
        kept_bytes = self.shape.attention_bytes(itemsize, tensor_parallel) if self.keeps_attention else 0
        footprint = KVFootprint.of_values(
            self.planned_layers * cached_values(self.megatron, tensor_parallel),
            itemsize,
            budget,
            mpu.get_context_parallel_world_size(),
            self.planned_layers * kept_bytes,
        )
        return PlanOptions(
            max_tokens=max_tokens,
            shape=self.shape,
            footprint=footprint,
            forward_only=forward_only,
            system=self.system,
            host=host_tier(self.megatron, self.planned_layers, self.settings),
            recompute=self.settings.kv_recompute and self.system is PSRL,
        )

    def new_session(self, plan: ExecutionPlan, router: RouterSamples | None, routes: TokenRoutes | None) -> Session:
        return Session(
            plan,
            chunk_layers=self.chunk_layers,
            device=self.device,
            attention_backend=self.attention_backend,
            path_in_place=self.path_in_place and plan.tiers is None,
            token_multiple=token_multiple(self.megatron),
            router=router,
            routes=routes,
            context=context_rank(),
            max_logit_rows=self.settings.max_logit_rows,
        )
