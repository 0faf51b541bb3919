"""veRL on a machine without a GPU: a CPU platform and the few places that assume device memory apart from the host's.

:func:`install` does nothing where CUDA is available.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager

from psrl.integrations.megatron import cpu_device
from psrl.integrations.megatron.hooks import HookSet

HOOKS = HookSet()


def install() -> None:
    """Make the CPU veRL's platform in this process and apply the hooks. Idempotent; nothing where CUDA is available."""
    if cpu_device.is_active():
        cpu_device.install()
        HOOKS.install()


def choose() -> None:
    """Make the CPU veRL's platform, and nothing else yet. Nothing where CUDA is available."""
    if cpu_device.is_active():
        cpu_platform()


# What veRL calls on ``torch.cuda`` through ``get_torch_device()``.
_DEVICE_MODULE = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: cpu_device.CPU,
    get_device_name=lambda device=None: "CPU",
    set_device=lambda device: None,
    synchronize=lambda device=None: None,
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    max_memory_allocated=lambda device=None: 0,
    max_memory_reserved=lambda device=None: 0,
    reset_peak_memory_stats=lambda device=None: None,
    mem_get_info=lambda device=None: (0, 0),
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host processor as veRL's device. Chosen by :func:`install` or ``VERL_PLATFORM=cpu``, never detected."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False: a process without GPUs may still drive a cluster that has them."""
        return False

    def current_device(self) -> Any:
        return cpu_device.CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Everything has already run."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has none."""

    def empty_cache(self) -> None:
        """The host allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """veRL counts "GPU" and "NPU" resources only (single_controller/ray/base.py:230): logical GPU slots."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


@HOOKS.add(
    cause="the platform is a process-wide singleton that is detected on first use, as CUDA where nothing is found",
    upstream="verl/plugin/platform/platform_manager.py:140 (get_platform)",
    remove_when="veRL ships a CPU platform",
)
def cpu_platform() -> None:
    platform_manager._current_platform = PlatformCPU()


@HOOKS.add(
    cause="asks for the backend 'cpu:gloo,<device>:<backend>', which on the CPU names the same device twice",
    upstream="verl/utils/distributed.py:83 (initialize_global_process_group_ray)",
    remove_when="the default backend of a CPU platform is its communication backend alone",
)
def gloo_process_group() -> None:
    from verl.utils import distributed
    from verl.workers import engine_workers

    upstream = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        upstream(timeout_second=timeout_second, backend=backend or "gloo")

    distributed.initialize_global_process_group_ray = initialize
    engine_workers.initialize_global_process_group_ray = initialize  # pyright: ignore[reportPrivateImportUsage]


@HOOKS.add(
    cause="offloading to the host frees the device's storage, which here is the only one, and reads flat parameter "
    "buffers that exist only with the distributed optimizer",
    upstream="verl/utils/megatron_utils.py:713-1004, called from verl/workers/engine/megatron/transformer_impl.py:739",
    remove_when="the helpers return at once when source and target device are the same",
)
def no_offload() -> None:
    from verl.workers.engine.megatron import transformer_impl

    def stay(*args: Any, **kwargs: Any) -> None:
        """Parameters, gradients and optimizer states are where they should be."""

    for name in (
        "load_megatron_model_to_gpu",
        "load_megatron_optimizer",
        "offload_megatron_model_to_cpu",
        "offload_megatron_optimizer",
    ):
        if not hasattr(transformer_impl, name):
            raise AttributeError(f"verl.workers.engine.megatron.transformer_impl has no {name}")
        setattr(transformer_impl, name, stay)
