"""How N ranks are laid out: sizes of every parallelism, and the connections that their groups use.

Ranks count up through tensor, context, data and pipeline parallel, in that order (Megatron's ``tp-cp-ep-dp-pp``):
groups of neighbours stay within a node as long as they fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from psrl.errors import ConfigError
from psrl.model_sizes import ModelSizes
from psrl.simulate.calibration import Calibration, Link


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Parallel sizes. Experts are sharded over ``tensor`` as well (Megatron's default).

    Raises:
        ConfigError: the sizes do not fit each other.
    """

    num_ranks: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Virtual pipeline stages on each rank (VPP)."""
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "tensor", "pipeline", "chunks", "context", "expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        model = self.tensor * self.pipeline * self.context
        if self.num_ranks % model:
            raise ConfigError(
                f"{self.num_ranks} ranks do not divide by tensor {self.tensor} x pipeline {self.pipeline} x context "
                f"{self.context} = {model}"
            )
        if (self.data * self.context) % self.expert:
            raise ConfigError(
                f"expert {self.expert} must divide data x context = {self.data} x {self.context} "
                f"(of {self.num_ranks} ranks)"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ConfigError(f"{self.chunks} virtual pipeline stages need a pipeline of at least 2 stages")

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.num_ranks // (self.tensor * self.pipeline * self.context)

    @property
    def replicas_per_expert_group(self) -> int:
        """Data-parallel ranks whose micro-batches exchange tokens, so that they run in step."""
        return max(1, self.expert // math.gcd(self.expert, self.context))

    def check_model(self, model: ModelSizes) -> None:
        """
        Raises:
            ConfigError: the model does not divide into this layout.
        """
        if self.pipeline * self.chunks > model.num_layers:
            raise ConfigError(
                f"{self.pipeline} x {self.chunks} pipeline stages are more than the {model.num_layers} layers of "
                f"{model.name}"
            )
        if self.expert > 1 and (not model.num_experts or model.num_experts % self.expert):
            raise ConfigError(f"expert {self.expert} must divide the {model.num_experts} experts of {model.name}")
        if model.num_heads % self.tensor:
            raise ConfigError(f"tensor {self.tensor} must divide the {model.num_heads} heads of {model.name}")

    def layers_of_stages(self, model: ModelSizes) -> list[int]:
        """Layers of every virtual stage, in the order of the model."""
        num_stages = self.pipeline * self.chunks
        return [len(part) for part in np.array_split(np.arange(model.num_layers), num_stages)]


@dataclass(frozen=True, slots=True)
class Connections:
    """Seconds that data takes between the ranks of a group."""

    layout: ClusterLayout
    calibration: Calibration

    def _link(self, stride: int, size: int) -> Link:
        inside = stride * size <= self.calibration.processes_per_node
        return self.calibration.node if inside else self.calibration.network

    @property
    def tensor(self) -> Link:
        return self._link(1, self.layout.tensor)

    @property
    def context(self) -> Link:
        return self._link(self.layout.tensor, self.layout.context)

    @property
    def expert(self) -> Link:
        return self._link(self.layout.tensor, self.layout.expert)

    @property
    def data(self) -> Link:
        return self._link(self.layout.tensor, self.layout.context * self.layout.data)

    @property
    def pipeline(self) -> Link:
        return self._link(self.layout.num_ranks // self.layout.pipeline, self.layout.pipeline)


def send_seconds(link: Link, num_bytes: float) -> float:
    """A transfer from one process to another."""
    return link.latency + num_bytes / link.bandwidth


def gather_seconds(link: Link, size: int, num_bytes: float) -> float:
    """An all-gather, reduce-scatter or all-to-all in which every process ends or begins with ``num_bytes``."""
    if size == 1:
        return 0.0
    return link.collective_latency * math.log2(size) + num_bytes * (size - 1) / size / link.collective_bandwidth


def all_reduce_seconds(link: Link, size: int, num_bytes: float) -> float:
    """A ring: reduce-scatter and all-gather."""
    if size == 1:
        return 0.0
    return link.collective_latency * math.log2(size) + 2 * num_bytes * (size - 1) / size / link.collective_bandwidth
