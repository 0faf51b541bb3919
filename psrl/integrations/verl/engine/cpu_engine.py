"""veRL's Megatron engine on any device: what its entry points need on a CPU, and float64 throughout."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch

from psrl.integrations.megatron import cpu_device, float64, megatron_bridge
from psrl.integrations.megatron.local_spec import layer_specs, uses_transformer_engine
from psrl.integrations.verl import compat, platform
from psrl.integrations.verl.engine.value_head import allow_missing_head

if TYPE_CHECKING:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine as _Engine
else:
    _Engine = object


class DeviceModeMixin(_Engine):
    """Goes first in the bases: ``class Engine(DeviceModeMixin, ..., MegatronEngineWithLMHead)``.

    With CUDA every method is that of the next base. A thread enters the model through the engine's methods only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.install()
        platform.install()
        with cpu_device.device_mode():
            super().__init__(*args, **kwargs)
        if self.engine_config.dtype == "float64":
            float64.install()

    @contextlib.contextmanager
    def _device_mode(self) -> Iterator[None]:
        """Around everything that builds, runs, updates, saves or loads the model."""
        with cpu_device.device_mode(), contextlib.ExitStack() as stack:
            if self.engine_config.dtype == "float64":
                stack.enter_context(float64.float64_mode())
            yield

    def initialize(self) -> None:
        with self._device_mode():
            super().initialize()

    def _build_tf_config(self) -> None:
        if not self.engine_config.vanilla_mbridge:
            megatron_bridge.install()
        super()._build_tf_config()
        if self.is_value_model:
            allow = allow_missing_head if self.vanilla_bridge else megatron_bridge.allow_missing_head
            allow(self.bridge)

    def _build_megatron_module(self) -> Any:
        with layer_specs(self.engine_config.psrl.attention_backend):
            module = super()._build_megatron_module()
        if self.peft_cls is not None and not uses_transformer_engine():
            megatron_bridge.feed_adapters(module)
        return module

    def _resolve_override_ddp_config(self) -> dict[str, Any]:
        """Float64 gradients are accumulated in float64; upstream rounds every gradient to float32."""
        config = super()._resolve_override_ddp_config()
        if self.param_dtype == torch.float64:
            config["grad_reduce_in_fp32"] = False
        return config

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._device_mode():
            output = super().forward_backward_batch(*args, **kwargs)
        if self.param_dtype == torch.float64 and "loss" in output:
            # engine_workers.py:190 sums them with torch.tensor, which makes float32 of Python floats.
            output["loss"] = [torch.as_tensor(loss, dtype=torch.float64) for loss in output["loss"]]
        return output

    def optimizer_zero_grad(self) -> None:
        with self._device_mode():
            super().optimizer_zero_grad()

    def optimizer_step(self) -> float:
        with self._device_mode():
            return super().optimizer_step()

    def lr_scheduler_step(self) -> float | list[float]:
        with self._device_mode():
            return super().lr_scheduler_step()

    def to(self, *args: Any, **kwargs: Any) -> None:
        with self._device_mode():
            super().to(*args, **kwargs)

    def get_per_tensor_param(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Generator[tuple[str, torch.Tensor], None, None], dict[str, Any] | None]:
        with self._device_mode():
            params, peft_config = super().get_per_tensor_param(*args, **kwargs)
        return cpu_device.in_device_mode(iter(params)), peft_config

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._device_mode():
            super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # no_grad: with float32 parameters the distributed optimizer writes into views of leaves
        # (megatron/core/optimizer/distrib_optimizer.py:940).
        with self._device_mode(), torch.no_grad():
            super().load_checkpoint(*args, **kwargs)
