"""veRL engines with prefix sharing, registered as backend ``psrl`` for language and value models.

Update, reference forward and old log-prob all reach ``forward_backward_batch``; everything else is veRL's Megatron
engine. With ``psrl.enable=false`` that method is veRL's too.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from psrl.config import PSRLConfig
from psrl.integrations.megatron.backend_choice import BackendChoice, choose_backend
from psrl.integrations.megatron.layer_spec import number_cache_layers, share_prefixes_in_spec
from psrl.integrations.megatron.output_layer import select_output_rows
from psrl.integrations.megatron.positions import rotate_by_position
from psrl.integrations.megatron.router import expert_layers
from psrl.integrations.megatron.shape import model_shape
from psrl.integrations.verl.engine.batch_plans import LossFunction
from psrl.integrations.verl.engine.config import PSRLEngineConfig
from psrl.integrations.verl.engine.cpu_engine import DeviceModeMixin
from psrl.integrations.verl.engine.edge_outputs import EdgeOutputs, edge_outputs
from psrl.integrations.verl.engine.facts import EngineFacts
from psrl.integrations.verl.engine.fused_options import check_fused_kernels
from psrl.integrations.verl.engine.mini_batch import BatchReport, MiniBatchRun, RunnableModel
from psrl.integrations.verl.engine.plan_ahead import BatchPlanner
from psrl.integrations.verl.engine.routes import FIELD
from psrl.integrations.verl.engine.support import check_supported
from psrl.runtime.attention import IN_PLACE_BACKENDS, PathAccess, path_access
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.session import BoundMicroBatch
from psrl.systems import find_system

if TYPE_CHECKING:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine as _Engine
else:
    _Engine = object


class PrefixSharingMixin(_Engine):
    """Goes before a MegatronEngine in the bases. ``last_report`` is None until a batch has run with sharing."""

    engine_config: PSRLEngineConfig
    tf_config: Any
    """Megatron's TransformerConfig, which declares as optional the sizes that it fills in itself."""
    bridge: Any
    provider: Any
    last_report: BatchReport | None = None
    attention_choice: BackendChoice
    """Set when the model is built with sharing."""
    chunk_layers: tuple[int, ...] = ()
    """Attention layers of each model chunk of this rank."""
    _edge_outputs: EdgeOutputs
    """Of the stage that has the output layer, in language models."""
    expert_layers: tuple[int, ...] = ()
    """Numbers, from 1, of this rank's layers with experts."""

    @property
    def psrl_config(self) -> PSRLConfig:
        return self.engine_config.psrl

    # -------------------------------------------------------------------------------------------------- building
    def _build_megatron_module(self) -> Any:
        if not self.psrl_config.enable:
            return super()._build_megatron_module()
        check_supported(self.tf_config or self.provider, self.engine_config, self.model_config)
        check_fused_kernels(
            self.engine_config, self.model_config, device=get_device_name(), is_value_model=self.is_value_model
        )
        self._share_prefixes_in_bridge()
        module = super()._build_megatron_module()
        chunks = [cast(nn.Module, unwrap_model(chunk)) for chunk in module]
        for chunk in chunks:
            rotate_by_position(chunk)
            if chunk.post_process:
                self._prepare_output_layer(chunk.get_submodule("output_layer"))
        self.attention_choice = self._choose_attention(cast(TransformerConfig, chunks[0].config))
        self.chunk_layers = number_cache_layers(chunks)
        self.expert_layers = expert_layers(chunks)
        return module

    def _prepare_output_layer(self, layer: nn.Module) -> None:
        select_output_rows(layer)
        if not self.is_value_model:
            self._edge_outputs = edge_outputs(
                layer, max_logit_rows=self.psrl_config.max_logit_rows, fused=self.engine_config.use_fused_kernels
            )

    def _maybe_enable_fused_kernels(self) -> None:
        """Upstream's gives the model another forward, which takes a label for every token."""
        if not self.psrl_config.enable:
            super()._maybe_enable_fused_kernels()

    def _choose_attention(self, config: TransformerConfig) -> BackendChoice:
        """Collective, as building the model is."""
        device = torch.device(get_device_id()) if get_device_name() == "cuda" else torch.device("cpu")
        tensor_parallel = mpu.get_tensor_model_parallel_world_size()
        shape = LayerShape.of_model(model_shape(config, 1), tensor_parallel, self.param_dtype, device)
        in_place = any(self._access_with(backend, config).in_place for backend in IN_PLACE_BACKENDS)
        return choose_backend(self.psrl_config.attention_backend, shape, in_place=in_place)

    def _share_prefixes_in_bridge(self) -> None:
        """Both bridges build the model from a layer spec that is asked for late: wrap the question."""
        if self.vanilla_bridge:
            spec_of = self.bridge._get_transformer_layer_spec
            self.bridge._get_transformer_layer_spec = lambda *a, **k: share_prefixes_in_spec(spec_of(*a, **k))
            return
        spec = self.provider.transformer_layer_spec
        self.provider.transformer_layer_spec = (
            (lambda *a, **k: share_prefixes_in_spec(spec(*a, **k))) if callable(spec) else share_prefixes_in_spec(spec)
        )

    # --------------------------------------------------------------------------------------------------- running
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """One mini-batch: outputs, loss and metrics as upstream returns them for a single micro-batch."""
        planner = self.planner
        if planner is None:
            # Upstream's own infer_batch passes None here (base.py).
            return super().forward_backward_batch(data, loss_function, forward_only)  # pyright: ignore[reportArgumentType]
        rows = data.exclude(FIELD).to(get_device_id())  # no loss reads routes
        self._assign_normalizers(rows)
        start = time.perf_counter()
        plans = planner.plans_of(data, loss_function, forward_only=forward_only)
        model = RunnableModel(self.module, self.micro_batch_outputs, self.get_data_parallel_group())
        run = MiniBatchRun(self.facts, model, rows, loss_function, plans, time.perf_counter() - start)
        output = run.forward() if forward_only else run.update()
        self.last_report = run.report()
        if not forward_only:
            planner.updated(plans)
        return output

    def _assign_normalizers(self, data: TensorDict) -> None:
        """Global normalisers of the loss, as upstream's ``forward_backward_batch`` sets them."""
        loss_mask = data["loss_mask"]
        num_tokens = (loss_mask.values() if loss_mask.is_nested else loss_mask).sum().to(get_device_id())
        torch.distributed.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(
            data,
            batch_num_tokens=num_tokens.item(),
            dp_size=self.get_data_parallel_size(),
            sp_size=self.engine_config.context_parallel_size,
        )

    @property
    def facts(self) -> EngineFacts:
        """What plans and runs know of this engine. Its model is built."""
        config, hf_config = self.engine_config, self.model_config.hf_config
        return EngineFacts(
            settings=self.psrl_config,
            system=find_system(config.sharing_system),
            megatron=self.tf_config,
            shape=model_shape(self.tf_config, 1 if self.is_value_model else hf_config.vocab_size),
            is_value_model=self.is_value_model,
            param_dtype=self.param_dtype,
            device=torch.device(get_device_id()),
            chunk_layers=self.chunk_layers,
            expert_layers=self.expert_layers,
            attention_backend=self.attention_choice.name,
            path_in_place=self.path_access.in_place,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.max_token_len_per_gpu,
            infer_max_token_len_per_gpu=config.infer_max_token_len_per_gpu,
            use_fused_kernels=config.use_fused_kernels,
            router_replay_mode=config.router_replay.mode,
        )

    @cached_property
    def planner(self) -> BatchPlanner | None:
        """None without sharing."""
        return BatchPlanner(lambda: self.facts) if self.psrl_config.enable else None

    @cached_property
    def path_access(self) -> PathAccess:
        """How attention reaches the cached path."""
        return self._access_with(self.attention_choice.name, self.tf_config)

    def _access_with(self, backend: str, config: TransformerConfig) -> PathAccess:
        return path_access(
            backend,
            context_parallel=self.engine_config.context_parallel_size,
            is_latent=config.multi_latent_attention,
            has_host_tier=bool(self.psrl_config.kv_host_bytes),
        )

    def micro_batch_outputs(
        self, micro_batch: BoundMicroBatch, output: Tensor, with_entropy: bool
    ) -> dict[str, Tensor]:
        """Outputs [E] of the micro-batch's edges from the output layer's rows [1, R, columns] of this rank."""
        outputs = self._local_outputs(micro_batch, output, with_entropy)
        context = micro_batch.context
        return outputs if context is None else {kind: context.join_edges(x_e) for kind, x_e in outputs.items()}

    def _local_outputs(self, micro_batch: BoundMicroBatch, output: Tensor, with_entropy: bool) -> dict[str, Tensor]:
        if self.is_value_model:
            return {"values": output[0, :, 0].to(self.facts.output_dtype)[micro_batch.edge_rows_e]}
        log_probs, entropy = self._edge_outputs(micro_batch, output[0], with_entropy)
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}


@EngineRegistry.register(model_type="language_model", backend="psrl", device=["cpu", "cuda"])
class PSRLEngineWithLMHead(DeviceModeMixin, PrefixSharingMixin, MegatronEngineWithLMHead):
    """Actor and reference engine."""


@EngineRegistry.register(model_type="value_model", backend="psrl", device=["cpu", "cuda"])
class PSRLEngineWithValueHead(DeviceModeMixin, PrefixSharingMixin, MegatronEngineWithValueHead):
    """Critic engine."""
