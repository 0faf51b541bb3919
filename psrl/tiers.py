"""Records of the host tier: what moves between the device and host memory, step by step.

A *unit* is one layer of a block's K/V, or of its gradient accumulators. A *step* is one layer of one execution of a
micro-batch, forward or backward: only the units of that layer have to be on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psrl.errors import ConfigError

POLICIES = ("belady", "lru")


class Unit(NamedTuple):
    """One layer of a block, of its K/V or of its gradient accumulators."""

    block: int
    layer: int
    is_grad: bool


class Save(NamedTuple):
    """A copy from the device to the host."""

    unit: Unit
    host_start: int
    """Its first byte in the host pool."""


@dataclass(frozen=True, slots=True)
class TierStep:
    """One layer of one execution. At its start, in this order: saves, evicts, fetches, allocates, prefetches."""

    micro_batch: int
    layer: int
    backward: bool
    saves: tuple[Save, ...]
    """Copies to start: of units that are evicted now or later, and do not change until then."""
    evicts: tuple[Unit, ...]
    """Dropped from the device. The host has a copy of each."""
    fetches: tuple[Unit, ...]
    """Copied to the device, for this step."""
    allocates: tuple[Unit, ...]
    """New on the device: K/V that the step writes, accumulators that start at zero."""
    prefetches: tuple[Unit, ...]
    """Copied to the device while the step runs, for the next one."""
    frees: tuple[Unit, ...]
    """Not needed after the step, in any tier."""
    stale: tuple[Unit, ...]
    """Accumulators that the step has changed: their copy on the host is worth nothing any more."""
    kv_bytes: int
    """K/V on the device while the step runs, prefetched units included."""
    grad_bytes: int
    """Accumulators on the device."""
    host_bytes: int
    """Copies on the host."""


@dataclass(frozen=True, slots=True)
class TierSchedule:
    """Every transfer of a plan, known before it runs."""

    num_layers: int
    policy: str
    kv_unit_bytes: tuple[int, ...]
    """Of a K/V unit of each block."""
    grad_unit_bytes: tuple[int, ...]
    steps: tuple[TierStep, ...]
    device_bytes_peak: int
    host_pool_bytes: int
    """Size of the host pool: one past the last byte that a copy takes."""
    bytes_to_host: int
    bytes_to_device: int

    @property
    def bytes_moved(self) -> int:
        return self.bytes_to_host + self.bytes_to_device

    def unit_bytes(self, unit: Unit) -> int:
        return (self.grad_unit_bytes if unit.is_grad else self.kv_unit_bytes)[unit.block]


class LayerVisit(NamedTuple):
    """A layer's turn in an execution with a backward."""

    layer: int
    backward: bool


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory for what the device's budget does not hold, and how a backward visits the layers."""

    budget_bytes: int
    """Most bytes of the host pool."""
    num_layers: int
    """Layers of this rank; the footprint's bytes are spread evenly over them."""
    repeats: tuple[tuple[int, ...], ...] = ()
    """Groups of consecutive layers whose attention runs forward again just before the group's backward (activation
    recompute). A layer in no group does not."""
    policy: str = "belady"
    """Which unit leaves the device: ``belady``, that with the farthest next use, or for comparison ``lru``."""
    flops_per_byte: float = 16_000.0
    """FLOPs that the device does in the time a byte takes over the link to the host, where neither hides the other."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"the policy of the host tier must be one of {', '.join(POLICIES)}, got {self.policy!r}")

    def visits(self) -> Sequence[LayerVisit]:
        """Forward, then backward, of all layers. A layer that is repeated right after its forward is visited once."""
        group_of = {layer: group for group in self.repeats for layer in group}
        out = [LayerVisit(layer, False) for layer in range(self.num_layers)]
        for layer in reversed(range(self.num_layers)):
            group = group_of.get(layer, ())
            if group and layer == group[-1]:
                out += [LayerVisit(again, False) for again in group]
            out.append(LayerVisit(layer, True))
        return [visit for visit, before in zip(out, [None, *out], strict=False) if visit != before]
