"""Float64 parameters, gradients, optimizer states and log-probs on the CPU: Megatron-Core and veRL stop at float32.

Used to tell apart a wrong gradient from a rounding error. Nothing here changes another dtype.
:func:`install` once per process; :func:`float64_mode` around every entry point of a float64 engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from psrl.integrations.megatron.hooks import HookSet

HOOKS = HookSet()


def install() -> None:
    """Apply the hooks, once per process."""
    HOOKS.install()


@contextlib.contextmanager
def float64_mode() -> Iterator[None]:
    """While active, float64 tensors are not narrowed by ``tensor.float()`` or ``softmax(..., dtype=torch.float32)``.

    Cause: the full-precision paths widen so, which narrows float64: log-probs
    (megatron/core/tensor_parallel/cross_entropy.py:28), gradients of the distributed optimizer
    (megatron/core/optimizer/distrib_optimizer.py:2419), expert routers (megatron/core/transformer/moe/moe_utils.py:724
    and :780). Remove when they keep wider dtypes.
    """
    with _KeepFloat64():
        yield


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func is torch.softmax and kwargs and kwargs.get("dtype") == torch.float32 and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **(kwargs or {}))


@HOOKS.add(
    cause="knows float16, float32 and bfloat16 only and raises for any other name",
    upstream="verl/utils/torch_dtypes.py:61 (PrecisionType.to_dtype)",
    remove_when="veRL's PrecisionType.FULL maps to torch.float64",
)
def float64_by_name() -> None:
    from verl.utils.torch_dtypes import PrecisionType

    upstream = PrecisionType.to_dtype

    def to_dtype(precision: object) -> torch.dtype:
        if precision in ("float64", torch.float64):
            return torch.float64
        return upstream(precision)

    PrecisionType.to_dtype = staticmethod(to_dtype)


@HOOKS.add(
    cause="the gradient norm that is reported and that clips is rounded to float32",
    upstream="megatron/core/utils.py:1207 (local_multi_tensor_l2_norm), megatron/core/optimizer/clip_grads.py:41",
    remove_when="the norm keeps the dtype of the gradients",
)
def grad_norm_keeps_float64() -> None:
    from megatron.core.optimizer import clip_grads

    upstream = clip_grads.l2_norm_impl

    def l2_norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, per_tensor: bool, *args: object):
        grads = tensor_lists[0]
        if grads and grads[0].dtype == torch.float64:
            return torch.stack([grad.norm() for grad in grads]).norm().reshape(1), None
        return upstream(chunk_size, noop_flag, tensor_lists, per_tensor, *args)

    clip_grads.l2_norm_impl = l2_norm


@HOOKS.add(
    cause="the value head is created in the default dtype, not in params_dtype",
    upstream="mbridge/utils/layer.py:34 (LinearForLastLayer.__init__)",
    remove_when="the head takes its dtype from the configuration",
)
def value_head_in_float64() -> None:
    from mbridge.utils.layer import LinearForLastLayer

    upstream = LinearForLastLayer.__init__

    def __init__(self: LinearForLastLayer, input_size: int, output_size: int, *, config: Any, bias: bool = False):
        upstream(self, input_size, output_size, config=config, bias=bias)
        if config.params_dtype == torch.float64:
            self.to(torch.float64)

    LinearForLastLayer.__init__ = __init__


@HOOKS.add(
    cause="a torch function mode is not active inside a backward, and so not where a layer is recomputed",
    upstream="megatron/core/tensor_parallel/random.py:573 (checkpoint)",
    remove_when="float64_mode is not needed",
)
def recomputation_in_float64_mode() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    upstream = random.checkpoint

    def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        def in_mode(*inputs: Any) -> Any:
            with float64_mode():
                return function(*inputs)

        return upstream(in_mode, distribute_saved_activations, *args)

    random.checkpoint = tensor_parallel.checkpoint = checkpoint
