"""The host tier of a plan, from Megatron-Core's configuration."""

from __future__ import annotations

from typing import Any

from psrl.config import PSRLConfig
from psrl.tiers import HostTier


def host_tier(config: Any, num_layers: int, settings: PSRLConfig) -> HostTier | None:
    """None where there is no host memory to use.

    Args:
        config: ``TransformerConfig``.
        num_layers: of this rank, which has one pipeline stage only.
        settings: the ``psrl`` group.
    """
    if not settings.kv_host_bytes:
        return None
    return HostTier(
        settings.kv_host_bytes,
        num_layers,
        repeated_layers(config, num_layers),
        flops_per_byte=settings.kv_host_flops_per_byte,
    )


def repeated_layers(config: Any, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Groups of layers whose attention's inputs are read from the cache again before the group's backward.

    As ``TransformerBlock._checkpointed_forward`` cuts them (megatron/core/transformer/transformer_block.py). Selective
    recompute of ``core_attn`` repeats what is around the cache, but for latents, which are read outside of it.
    """
    if config.recompute_granularity == "full":
        size = config.recompute_num_layers
        if config.recompute_method == "block":
            return tuple((layer,) for layer in range(min(size, num_layers)))
        starts = range(0, num_layers, size)
        return tuple(tuple(range(start, min(start + size, num_layers))) for start in starts)
    is_selective = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
    if is_selective and not config.multi_latent_attention:
        return tuple((layer,) for layer in range(num_layers))
    return ()
