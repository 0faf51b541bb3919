"""Layer specs with modules that share prefixes, and the number of each layer in its cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.core_attention import LatentCoreAttention, PrefixCoreAttention
from psrl.integrations.megatron.latent_attention import PrefixLatentAttention
from psrl.integrations.megatron.router import PrefixRouter


def share_prefixes_in_spec(spec: Any) -> Any:
    """A copy of a decoder block or layer spec with attention that shares prefixes and, for experts, PrefixRouter.

    Raises:
        UnsupportedError: the spec has no known ``core_attention``, or attends to latents or routes in its own way.
    """
    spec = copy.deepcopy(spec)
    layers = [spec]
    if isinstance(spec, TransformerBlockSubmodules) and spec.layer_specs is not None:
        layers = spec.layer_specs
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        if not isinstance(attention, ModuleSpec) or not hasattr(attention.submodules, "core_attention"):
            raise UnsupportedError(
                f"prefix sharing cannot replace the attention of layer spec {layer!r}; set psrl.enable=false"
            )
        _share_in_attention(cast(Any, attention))
        mlp = getattr(layer.submodules, "mlp", None)
        if isinstance(mlp, ModuleSpec) and isinstance(mlp.submodules, MoESubmodules):
            if mlp.submodules.router not in (TopKRouter, PrefixRouter):  # layers may share a spec
                raise UnsupportedError(
                    f"prefix sharing cannot replace the expert router {mlp.submodules.router!r}; set psrl.enable=false"
                )
            cast(Any, mlp.submodules).router = PrefixRouter
    return spec


def _share_in_attention(attention: Any) -> None:
    """Mutates the spec of a layer's self-attention; layers may share it."""
    if not issubclass(attention.module, MultiLatentAttention):
        attention.submodules.core_attention = PrefixCoreAttention
        return
    if attention.module not in (MLASelfAttention, PrefixLatentAttention):
        raise UnsupportedError(
            f"prefix sharing cannot replace the latent attention {attention.module!r}; set psrl.enable=false"
        )
    attention.module = PrefixLatentAttention
    attention.submodules.core_attention = LatentCoreAttention


def number_cache_layers(chunks: Sequence[nn.Module]) -> tuple[int, ...]:
    """Number the PrefixCoreAttention modules of each model chunk of this rank. Returns how many each has."""
    counts: list[int] = []
    for chunk in chunks:
        modules = [m for m in chunk.modules() if isinstance(m, PrefixCoreAttention)]
        for index, module in enumerate(modules):
            module.cache_layer = index
        counts.append(len(modules))
    return tuple(counts)
