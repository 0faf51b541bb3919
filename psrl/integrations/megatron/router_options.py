"""What a configuration asks of expert routers. Reads the configuration only; imports no upstream."""

from __future__ import annotations

from typing import Any


def uses_statistics(config: Any) -> bool:
    """Whether routers have losses or statistics that depend on how often a token is counted."""
    return needs_loads(config) or bool(config.moe_z_loss_coeff) or bool(config.moe_router_enable_expert_bias)


def needs_loads(config: Any) -> bool:
    """Whether the balancing loss needs every expert's load before pass 2, which takes one more forward."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    return any(kind == "aux_loss" and coeff > 0 for kind, coeff in zip(kinds, coefficients, strict=True))


def expert_layer_numbers(config: Any) -> tuple[int, ...]:
    """Of the model, from 1; the other layers are dense."""
    frequency = config.moe_layer_freq
    has_experts = [i % frequency == 0 for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return tuple(number for number, is_expert in enumerate(has_experts, start=1) if is_expert)


def replays_routes(config: Any) -> bool:
    """Whether routers may be told which experts to use, or be asked which they used."""
    return bool(config.moe_enable_routing_replay)
