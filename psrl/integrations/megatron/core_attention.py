"""``core_attention`` of a layer spec: attention over ``[cached path | local tokens]``.

Shape legend: T local tokens of this rank, S keys of the path and of the whole micro-batch, N query heads, K kv heads
(both of this tensor-parallel rank), H head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from psrl.errors import UnsupportedError
from psrl.integrations.megatron.packed import execution_of
from psrl.integrations.megatron.router import PrefixRouter
from psrl.runtime.attention import attend_layout
from psrl.runtime.exchange import exchange_kv
from psrl.runtime.session import enter_layer


class PrefixCoreAttention(MegatronModule):
    """Stands where TEDotProductAttention or DotProductAttention would; has no parameters and no state."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.cache_layer = -1
        """Index among the layers of this model chunk; set by ``number_cache_layers``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Query [T, N, H], key and value [T, K, H], after rotary. Returns [T, N * H]."""
        execution = execution_of(packed_seq_params)
        enter_layer(execution)
        k_SKH, v_SKH = exchange_kv(execution, self.cache_layer, key, value)
        out_TNH = attend_layout(
            query,
            k_SKH,
            v_SKH,
            execution.micro_batch.layout,
            scale=self.scale,
            backend=execution.attention_backend,
        )
        return out_TNH.reshape(len(query), -1)


def share_prefixes_in_spec(spec: Any) -> Any:
    """A copy of a decoder block or layer spec with PrefixCoreAttention and, for experts, PrefixRouter.

    Raises:
        UnsupportedError: the spec is of a kind that has no known ``core_attention``, or routes in its own way.
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
        cast(Any, attention.submodules).core_attention = PrefixCoreAttention
        mlp = getattr(layer.submodules, "mlp", None)
        if isinstance(mlp, ModuleSpec) and isinstance(mlp.submodules, MoESubmodules):
            if mlp.submodules.router not in (TopKRouter, PrefixRouter):  # layers may share a spec
                raise UnsupportedError(
                    f"prefix sharing cannot replace the expert router {mlp.submodules.router!r}; set psrl.enable=false"
                )
            cast(Any, mlp.submodules).router = PrefixRouter
    return spec


def number_cache_layers(chunks: Sequence[nn.Module]) -> tuple[int, ...]:
    """Number the PrefixCoreAttention modules of each model chunk of this rank. Returns how many each has."""
    counts: list[int] = []
    for chunk in chunks:
        modules = [m for m in chunk.modules() if isinstance(m, PrefixCoreAttention)]
        for index, module in enumerate(modules):
            module.cache_layer = index
        counts.append(len(modules))
    return tuple(counts)
