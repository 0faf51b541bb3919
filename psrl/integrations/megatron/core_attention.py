"""``core_attention`` of a layer spec: attention over ``[cached path | local tokens]``.

Shape legend: T local tokens of this rank, S keys of the path and of the whole micro-batch, N query heads, K kv heads
(both of this tensor-parallel rank), H head dim.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from psrl.cache import KVPair
from psrl.integrations.megatron.packed import execution_of
from psrl.runtime.attention import attend_layout
from psrl.runtime.exchange import exchange_kv
from psrl.runtime.in_place import attend_in_place
from psrl.runtime.session import Execution, enter_layer


class PrefixCoreAttention(MegatronModule):
    """Stands where TEDotProductAttention or DotProductAttention would; has no parameters and no state.

    It takes what they take, by the same names. Head sizes are those of the tensors, context-parallel ranks exchange
    K/V as psrl does it whatever ``cp_comm_type`` says, and results are equal from run to run without ``num_splits``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
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
        num_splits: int | None = None,
    ) -> Tensor:
        """Query [T, N, H], key and value [T, K, H], after rotary. Returns [T, N * H]."""
        execution = execution_of(packed_seq_params)
        enter_layer(execution)
        tables = execution.path_tables
        if tables is not None:
            out_TNH = attend_in_place(execution, tables, self.cache_layer, query, key, value, self.scale)
            return out_TNH.reshape(len(query), -1)
        k_SKH, v_SKH = self._path_and_local(execution, key, value)
        out_TNH = attend_layout(
            query,
            k_SKH,
            v_SKH,
            execution.micro_batch.layout,
            scale=self.scale,
            backend=execution.attention_backend,
            place=execution.kept_result(self.cache_layer),
        )
        return out_TNH.reshape(len(query), -1)

    def _path_and_local(self, execution: Execution, key: Tensor, value: Tensor) -> KVPair:
        return exchange_kv(execution, self.cache_layer, key, value)


class LatentCoreAttention(PrefixCoreAttention):
    """For keys and values [S, N, H] that a layer of latent attention has made of the path and the local tokens."""

    def _path_and_local(self, execution: Execution, key: Tensor, value: Tensor) -> KVPair:
        return KVPair(key, value)
