"""Bytes on the fullest rank, by formula: weights, gradients, optimizer, activations in flight, logits, K/V cache.

Activations of a layer: 34 bytes a token and hidden value at 2 bytes a number, attention scores not kept (Korthikanti et
al., 2022, section 4.1, less its 5 a s / h); scaled to the number's size and, with sequence parallelism, divided by the
tensor-parallel size. Full recompute keeps a layer's input only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from psrl.simulate.costs import CostModel
from psrl.simulate.sides import Batch

_ACTIVATION_NUMBERS = 17
"""Numbers that a layer keeps for a token and hidden value: 34 bytes at 2 bytes each."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    """With what an update keeps of attention between its passes."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def peak_memory(costs: CostModel, batches: Sequence[Batch]) -> MemoryUse:
    """Peak of an update: the largest of every part over ``batches`` (of all ranks), so an upper bound of their sum."""
    model, layout, itemsize = costs.model, costs.layout, costs.calibration.dtype_bytes
    dense, experts = costs.parameters_per_rank
    replicas = layout.data * layout.context
    states = (12 if itemsize < 4 else 8) * (
        dense / replicas + experts / max(1, replicas // layout.expert)
        if costs.distributed_optimizer
        else dense + experts
    )
    layers = layout.layers_of_stages(model)
    share = layout.tensor * layout.context
    in_flight = layout.pipeline if layout.chunks == 1 else layout.pipeline + (layout.pipeline - 1) / layout.chunks
    per_layer = 1 if costs.recompute == "full" else _ACTIVATION_NUMBERS
    activations = logits = kv = 0.0
    for batch in batches:
        for run in batch.passes:
            tokens = max((amounts.tokens for amounts in run.micro_batches), default=0)
            rows = max((amounts.rows for amounts in run.micro_batches), default=0)
            held = min(in_flight, len(run.micro_batches)) if run.is_training else 1 / max(layers)
            kept = held * sum(layers[0 :: layout.pipeline]) * per_layer
            if costs.recompute == "full":
                kept += _ACTIVATION_NUMBERS  # of the layer that is being recomputed
            activations = max(activations, tokens * model.hidden_size * itemsize * kept / share)
            # Logits, their float32 copy and its gradient.
            logits = max(logits, rows * model.vocab_size * (itemsize + 8) / share)
        kv = max(kv, batch.stats.kv_bytes_peak + batch.stats.attention_bytes if batch.stats is not None else 0)
    return MemoryUse(
        weights=int((dense + experts) * itemsize),
        gradients=int((dense + experts) * 4),
        optimizer=int(states),
        activations=int(activations),
        logits=int(logits),
        kv_cache=int(kv),
    )
