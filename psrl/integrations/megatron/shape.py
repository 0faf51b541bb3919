"""Megatron-Core's configuration as the cost model sees it."""

from __future__ import annotations

from typing import Any

from psrl.cost import LatentShape, ModelShape
from psrl.integrations.megatron.router_options import expert_layer_numbers


def model_shape(config: Any, output_size: int) -> ModelShape:
    """Sizes of the whole model. With experts, a token's feed-forward size is that of the experts that it visits.

    Args:
        config: ``TransformerConfig``.
        output_size: columns of the output layer.
    """
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn_size=_visited_ffn_size(config),
        output_size=output_size,
        gated_mlp=config.gated_linear_unit,
        latent=_latent_shape(config),
    )


def cached_values(config: Any, tensor_parallel: int) -> int:
    """Numbers that a layer of one rank caches of a token: its heads' K and V, or the latent, which all ranks have."""
    latent = _latent_shape(config)
    if latent is not None:
        return latent.cached_values
    return 2 * max(1, config.num_query_groups // tensor_parallel) * config.kv_channels


def _latent_shape(config: Any) -> LatentShape | None:
    if not config.multi_latent_attention:
        return None
    return LatentShape(
        query_rank=config.q_lora_rank or 0,
        kv_rank=config.kv_lora_rank,
        plain_dim=config.qk_head_dim,
        rotary_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
    )


def _visited_ffn_size(config: Any) -> int:
    """Mean over layers of the feed-forward columns that a token passes through."""
    if not config.num_moe_experts:
        return config.ffn_hidden_size
    visited = config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)
    share = len(expert_layer_numbers(config)) / config.num_layers
    return round(share * visited + (1 - share) * config.ffn_hidden_size)
