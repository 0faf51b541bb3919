"""Megatron-Bridge with psrl's modules: the expert router, and the layers of :mod:`local_spec` where there is no
TransformerEngine."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import nn

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.grouped_linear import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from psrl.integrations.megatron.hooks import HookSet
from psrl.integrations.megatron.local_spec import RMSNormColumnParallelLinear, uses_transformer_engine
from psrl.integrations.megatron.router import PrefixRouter

HOOKS = HookSet()
LOCAL_HOOKS = HookSet()
"""Without TransformerEngine only."""
HEAD = "lm_head.weight"


def check_importable() -> None:
    """Raises:
    UnsupportedError: Megatron-Bridge cannot be imported.
    """
    try:
        importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise UnsupportedError(
            f"vanilla_mbridge=False needs Megatron-Bridge, which cannot be imported here ({error}): set it to True"
        ) from error


def install() -> None:
    """Let Megatron-Bridge convert the weights of psrl's modules, and adapt its stand-ins. Idempotent."""
    HOOKS.install()
    if not uses_transformer_engine():
        LOCAL_HOOKS.install()


def feed_adapters(chunks: Iterable[nn.Module]) -> None:
    """Adapters of a projection behind a fused norm take the norm's output, as TransformerEngine's layer hands it on.

    Megatron-Bridge asks its own layers for it when it wraps them (megatron/bridge/peft/utils.py,
    ``get_adapter_attributes_from_linear``), and takes the stand-in for a plain column-parallel layer.
    """
    for chunk in chunks:
        for module in chunk.modules():
            wrapped = getattr(module, "to_wrap", None)
            if isinstance(wrapped, RMSNormColumnParallelLinear):
                wrapped.return_layernorm_output = True


def allow_missing_head(bridge: Any) -> None:
    """Let ``bridge`` load a checkpoint with tied embeddings into a value model, and export and save the head with it.

    Cause: a parameter whose name the checkpoint does not list is neither loaded nor exported
    (megatron/bridge/models/conversion/model_bridge.py, ``build_conversion_tasks``). Remove when a value head's is.
    """
    source = bridge.hf_pretrained.state.source
    if HEAD in source.get_all_keys():
        return
    files = source.key_to_filename_map  # bridges on the same checkpoint have it in common
    source._key_to_filename_map_cache = {**files, HEAD: next(iter(files.values()))}
    source._keys_cache = None
    upstream = source.load_tensors

    def load_tensors(keys: list[str]) -> dict[str, torch.Tensor]:
        """Of the head no rows, so that the bridge takes it for one of another size, which it leaves alone."""
        loaded = upstream([key for key in keys if key != HEAD])
        return {**loaded, HEAD: torch.empty(0)} if HEAD in keys else loaded

    source.load_tensors = load_tensors


@HOOKS.add(
    cause="knows by name which modules are split how, and of a module with a fused norm that the norm is not split",
    upstream="megatron/bridge/models/conversion/param_mapping.py (AutoMapping._detect_parallelism_type)",
    remove_when="it asks the module, or its parameters",
)
def parallelism_of_modules() -> None:
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    mapping.register_module_type(PrefixRouter.__name__, "replicated")
    mapping.register_module_type(ColumnParallelGroupedLinear.__name__, "column")
    mapping.register_module_type(RowParallelGroupedLinear.__name__, "row")
    upstream = mapping._detect_parallelism_type

    def detect(self: Any, module: nn.Module) -> str:
        if isinstance(module, RMSNormColumnParallelLinear):
            return "replicated" if self.megatron_param.endswith("layer_norm_weight") else "column"
        return upstream(self, module)

    mapping._detect_parallelism_type = detect


@HOOKS.add(
    cause="scatters column slices of a matrix as they lie; where no cast has copied them, gloo sends other elements",
    upstream="megatron/bridge/models/conversion/param_mapping.py (MegatronParamMapping.scatter_to_tp_ranks)",
    remove_when="slices are made contiguous",
)
def whole_slices_for_tensor_parallel_ranks() -> None:
    mapping: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping
    upstream = mapping.scatter_to_tp_ranks

    def scatter(self: Any, splits: list[torch.Tensor] | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return upstream(self, splits and [split.contiguous() for split in splits], *args, **kwargs)

    mapping.scatter_to_tp_ranks = scatter


@HOOKS.add(
    cause="looks for tied weights in a rank's first chunk; on the last stage of an interleaved pipeline the last chunk "
    "has them",
    upstream="megatron/bridge/models/conversion/model_bridge.py (MegatronModelBridge._broadcast_shared_embeddings)",
    remove_when="it asks every chunk",
)
def tied_weights_of_interleaved_pipelines() -> None:
    bridge: Any = importlib.import_module("megatron.bridge.models.conversion.model_bridge").MegatronModelBridge
    upstream = bridge._broadcast_shared_embeddings

    def broadcast(self: Any, chunks: Any) -> None:
        upstream(self, [chunk for chunk in chunks if is_end(unwrap_model(chunk))] or chunks)

    def is_end(chunk: Any) -> bool:
        return getattr(chunk, "pre_process", False) or getattr(chunk, "post_process", False)

    bridge._broadcast_shared_embeddings = broadcast


@HOOKS.add(
    cause="the value head is created in the default dtype, not in params_dtype",
    upstream="verl/models/mcore/bridge.py (make_value_model)",
    remove_when="the head takes its dtype from the configuration",
)
def value_head_in_the_dtype_of_the_model() -> None:
    module: Any = importlib.import_module("verl.models.mcore.bridge")
    upstream = module.make_value_model

    def make_value_model(hidden_size: int, sequence_parallel: bool) -> Any:
        add_head = upstream(hidden_size, sequence_parallel)

        def add(chunks: list[nn.Module]) -> list[nn.Module]:
            chunks = add_head(chunks) or chunks
            for chunk in chunks:
                head: Any = getattr(chunk, "output_layer", None)
                config: Any = chunk.config
                if isinstance(head, module.LinearForLastLayer):
                    head.to(config.params_dtype)
            return chunks

        return add

    module.make_value_model = make_value_model


@LOCAL_HOOKS.add(
    cause="asks whether the names of TransformerEngine's layers exist, not whether it is installed; without it they "
    "are mocks, which isinstance refuses",
    upstream="megatron/bridge/peft/utils.py and module_matcher.py (HAVE_TE, HAVE_TE_*); "
    "megatron/core/extensions/transformer_engine.py",
    remove_when="it asks megatron.core.extensions.transformer_engine.HAVE_TE",
)
def no_transformer_engine_in_adapters() -> None:
    for name in ("utils", "module_matcher"):
        module = importlib.import_module(f"megatron.bridge.peft.{name}")
        for flag in [flag for flag in vars(module) if flag.startswith("HAVE_TE")]:
            setattr(module, flag, False)
