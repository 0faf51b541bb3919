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


def replays_routes(config: Any) -> bool:
    """Whether routers may be told which experts to use, or be asked which they used."""
    return bool(config.moe_enable_routing_replay)
