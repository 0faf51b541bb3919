"""veRL's fused linear cross-entropy on tensors of the CPU, in Triton's interpreter. For ``tests/interpreter`` only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.helpers.parallel import Job, Layout, RankResult, run_job


@contextlib.contextmanager
def kernels_on_cpu() -> Iterator[list[tuple[int, int]]]:
    """Let veRL's host functions, kernels and autograd Function run where Triton interprets: what they ask of CUDA
    holds, and psrl, which refuses them on a CPU, is told of a CUDA device there. What they compute stays theirs.

    Yields:
        [rows, hidden] of every forward, as it runs.
    """
    from verl.utils.kernel import kernels

    import psrl.integrations.verl.engine.sharing as sharing
    from psrl.integrations.megatron import cpu_device

    cpu_device.install()  # streams and events of torch.cuda, of which the kernels of tensor parallelism have some
    shapes: list[tuple[int, int]] = []
    refuse = sharing.check_fused_kernels

    def seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor, *args: Any) -> Any:
            shapes.append(tuple(hidden.shape))
            return function(hidden, *args)

        return forward

    with (
        _bfloat16_in_the_interpreter(),
        mock.patch.object(kernels, "efficient_entropy_forward", seen(_as_cuda(kernels.efficient_entropy_forward))),
        mock.patch.object(kernels, "efficient_entropy_backward", _as_cuda(kernels.efficient_entropy_backward)),
        mock.patch.object(kernels, "get_torch_device", lambda: torch.cuda),
        # Marks for a profiler, which torch has with CUDA only.
        mock.patch.object(torch.cuda.nvtx, "range", lambda message: contextlib.nullcontext()),
        mock.patch.object(sharing, "check_fused_kernels", lambda *a, **k: refuse(*a, **{**k, "device": "cuda"})),
    ):
        yield shapes


@contextlib.contextmanager
def _bfloat16_in_the_interpreter() -> Iterator[None]:
    """Triton's interpreter keeps bfloat16 numbers as their bits, multiplies these in ``tl.dot``, and cuts off what
    float32 numbers have more: products and roundings as a device has them instead."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def rounding_cast(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return TensorHandle(bits, tl.bfloat16)
        return cast(builder, source, target)

    def widening_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(builder, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(builder, a, b, *rest)

    with (
        mock.patch.object(InterpreterBuilder, "create_dot", widening_dot),
        mock.patch.object(InterpreterBuilder, "cast_impl", rounding_cast),
    ):
        yield


def _as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """While ``function`` runs, tensors say that they are on a CUDA device, which it asserts of its arguments."""

    def call(*args: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)):
            return function(*args)

    return call


def run_fused_job(job: Job, layout: Layout) -> RankResult:
    """``run_job`` with the kernels on the CPU."""
    with kernels_on_cpu() as shapes:
        result = run_job(job, layout)
    assert shapes or not result.outputs, "a stage with outputs has not run the kernels"
    return result
