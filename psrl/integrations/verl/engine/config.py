"""The engine configuration ``strategy: psrl``: veRL's Megatron configuration and the ``psrl`` group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.workers.config import McoreEngineConfig
from verl.workers.config.engine import EngineConfig

from psrl.config import PSRLConfig
from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.megatron import cpu_device, megatron_bridge
from psrl.systems import find_system

CPU_DTYPES = ("float32", "float64", "bfloat16")
"""float16 needs TransformerEngine's optimizer."""
CUDA_DTYPES = ("float32", "bfloat16", "float16")
"""Megatron-Core refuses float64 on a GPU."""


@dataclass
class PSRLEngineConfig(McoreEngineConfig):
    """As ``McoreEngineConfig``, with prefix sharing in ``psrl`` and more choices of ``dtype``.

    ``vanilla_mbridge`` is True by default on the CPU, where Megatron-Bridge can seldom be imported.
    ``sequence_parallel`` is set to False where ``tensor_model_parallel_size`` is 1, as upstream.
    """

    strategy: str = "psrl"
    vanilla_mbridge: bool = field(default_factory=cpu_device.is_active)
    psrl: PSRLConfig = field(default_factory=PSRLConfig)
    sharing_system: str = "psrl"
    """For measurements: the engine plans as another system would (see ``psrl.systems``)."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # McoreEngineConfig's asserts strategy == "megatron" and a 16-bit dtype
        if not isinstance(self.psrl, PSRLConfig):
            if not isinstance(self.psrl, Mapping):
                raise ConfigError(f"psrl must be a mapping of settings, got {self.psrl!r}")
            object.__setattr__(self, "psrl", PSRLConfig.from_mapping(self.psrl))
        dtypes = CPU_DTYPES if cpu_device.is_active() else CUDA_DTYPES
        if self.dtype not in dtypes:
            raise ConfigError(f"dtype must be one of {', '.join(dtypes)} on this machine, got {self.dtype!r}")
        if self.dtype == "float64" and self.entropy_from_logits_with_chunking:
            raise UnsupportedError(
                "entropy_from_logits_with_chunking rounds to float32: set it to False with dtype=float64"
            )
        if cpu_device.is_active() and not self.vanilla_mbridge:
            megatron_bridge.check_importable()
        if find_system(self.sharing_system).cache.stores_leaves and (
            self.pipeline_model_parallel_size > 1 or self.context_parallel_size > 1
        ):
            raise UnsupportedError(
                f"sharing_system={self.sharing_system} stores the K/V of leaf micro-batches, which is built for "
                "neither pipeline_model_parallel_size nor context_parallel_size above 1: set both to 1"
            )
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False
