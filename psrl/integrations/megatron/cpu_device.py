"""Megatron-Core on a machine without a GPU: process-wide hooks and a scoped redirection of ``device="cuda"``.

Everything here does nothing where CUDA is available. :func:`install` once per process, before a model is built;
:func:`device_mode` around every entry point that builds, runs or saves a model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from psrl.integrations.megatron.hooks import HookSet

CPU = torch.device("cpu")
HOOKS = HookSet()
_local = threading.local()
_Item = TypeVar("_Item")


def is_active() -> bool:
    """True where Megatron has to run on the CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Apply the process-wide hooks. Idempotent; does nothing where CUDA is available."""
    if is_active():
        from psrl.integrations.megatron import cpu_experts

        HOOKS.install()
        cpu_experts.HOOKS.install()


@contextlib.contextmanager
def device_mode() -> Iterator[None]:
    """Redirect CUDA devices to the CPU for torch calls of this thread. Reentrant; nothing where CUDA is available.

    Cause: literals ``device="cuda"`` (megatron/core/optimizer/optimizer.py:473, optimizer/clip_grads.py:103,
    pipeline_parallel/schedules.py:596, ...), ``Module.cuda`` (mbridge/core/util.py:151), and an optimizer path chosen
    by ``tensor.type() == "torch.cuda.FloatTensor"`` (optimizer/optimizer.py:671, distrib_optimizer.py:361,
    clip_grads.py:167). Remove when Megatron-Core takes the device from its configuration.
    """
    if not is_active() or getattr(_local, "depth", 0):
        yield
        return
    _local.depth = 1
    try:
        with _CudaToCpu():
            yield
    finally:
        _local.depth = 0


def in_device_mode(iterator: Iterator[_Item]) -> Generator[_Item, None, None]:
    """Advance ``iterator`` in device mode, and leave the mode while the consumer runs."""
    while True:
        with device_mode():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


_TYPE_NAMES = {
    "torch.DoubleTensor": "torch.cuda.FloatTensor",  # Megatron's full-precision path, see float64.py
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _TYPE_NAMES.get(name, name)
        return func(*args, **kwargs) if kwargs else func(*args)


class _NoStream:
    """A CUDA stream or event on a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments of ``torch.cuda.Stream`` and ``torch.cuda.Event``."""

    def wait_stream(self, stream: Any) -> None:
        """Everything before this call has already run."""

    wait_event = record = wait = wait_stream

    def record_event(self, event: Any = None) -> _NoStream:
        """An event that has happened."""
        return _NoStream()

    def synchronize(self) -> None:
        """Everything has already run."""


@HOOKS.add(
    cause="asks torch.cuda for the current device, streams and synchronisation without a device argument",
    upstream="megatron/core/tensor_parallel/layers.py:261, megatron/core/distributed/param_and_grad_buffer.py:783, "
    "megatron/core/distributed/distributed_data_parallel.py:230",
    remove_when="Megatron-Core goes through a platform interface instead of torch.cuda",
)
def torch_cuda_functions() -> None:
    stream = _NoStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda device=None: None,
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


@HOOKS.add(
    cause="the small fused functions (swiglu, bias-dropout-add) and veRL's entropy are compiled at run time, which "
    "needs a C++ tool chain, costs seconds per shape, and fails under a TorchFunctionMode",
    upstream="megatron/core/jit.py:21, verl/utils/megatron/tensor_parallel.py:112",
    remove_when="both have a switch to leave these functions eager",
)
def no_run_time_compilation() -> None:
    import torch._dynamo

    torch._dynamo.config.disable = True


@HOOKS.add(
    cause="every model tells TransformerEngine, through the process's environment, which attention to take, and two "
    "models of one process may not differ; without TransformerEngine nobody reads it",
    upstream="megatron/core/models/common/language_module/language_module.py:92 (_set_attention_backend)",
    remove_when="it asks whether TransformerEngine is used",
)
def no_transformer_engine_environment() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def leave(self: LanguageModule) -> None:
        """The environment stays as it is."""

    LanguageModule._set_attention_backend = leave


@HOOKS.add(
    cause="every gloo group has a thread for its sockets that wakes up a hundred times a second, and a rank is in "
    "dozens of groups: together they take a good part of a core from what computes",
    upstream="torch/distributed/distributed_c10d.py:2169 (ProcessGroupGloo with the device by default)",
    remove_when="gloo's threads sleep until there is something to do, or the groups of a process share a device",
)
def one_gloo_device() -> None:
    from torch.distributed.distributed_c10d import ProcessGroupGloo, default_pg_timeout

    upstream = ProcessGroupGloo.__init__

    @functools.cache
    def devices() -> list[Any]:
        """As upstream makes them for every group."""
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if not interfaces:
            return [ProcessGroupGloo.create_default_device()]
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  not in the stubs
        options._devices, options._timeout = devices(), timeout
        options._threads = 2 * len(options._devices)
        upstream(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


@HOOKS.add(
    cause="weights are initialised, and recomputed layers replayed, with the CUDA generator; on the CPU the tensors "
    "draw from the CPU generator",
    upstream="megatron/core/tensor_parallel/random.py:41, :72 and :161 (_get_cuda_rng_state, _set_cuda_rng_state, "
    "CudaRNGStatesTracker)",
    remove_when="Megatron-Core's tracker takes the generator as an argument",
)
def rng_on_cpu_generator() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    class CPURNGStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Named states of the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or seed {seed} already exists")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    megatron_random.CudaRNGStatesTracker = CPURNGStatesTracker
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


@HOOKS.add(
    cause="without TransformerEngine and Apex, a distributed optimizer that has not stepped has no step counter to "
    "save or to load into; and loading makes all parameters share one counter, which torch's AdamW advances once per "
    "parameter, and overwrites it with the value from before the load",
    upstream="megatron/core/optimizer/distrib_optimizer.py:642 (state_dict), :821 and :940 (load_state_dict)",
    remove_when="every parameter has a counter of its own, from the loaded param_groups",
)
def adam_step_counters() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream_state_dict, upstream_load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict

    def params_of(optimizer: DistributedOptimizer) -> Iterator[torch.Tensor]:
        return (param for group in optimizer.optimizer.param_groups for param in group["params"])

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for param in params_of(self):
                self.optimizer.state[param]["step"] = torch.tensor(0.0)
        return upstream_state_dict(self)

    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        (step,) = {group["step"] for group in state_dict["optimizer"]["param_groups"]}
        upstream_load(self, state_dict)
        for param in params_of(self):
            self.optimizer.state[param]["step"] = torch.tensor(float(step))

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
