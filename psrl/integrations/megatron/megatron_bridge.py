"""Megatron-Bridge with psrl's modules: the expert router, and the layers of :mod:`local_spec` where there is no
TransformerEngine."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.hooks import HookSet
from psrl.integrations.megatron.local_spec import (
    ColumnParallelGroupedLinear,
    RMSNormColumnParallelLinear,
    RowParallelGroupedLinear,
    uses_transformer_engine,
)
from psrl.integrations.megatron.router import PrefixRouter

HOOKS = HookSet()
LOCAL_HOOKS = HookSet()
"""Without TransformerEngine only."""


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
