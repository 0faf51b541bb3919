"""veRL's fused linear cross-entropy against logits, and its kernels on tensors of the CPU, in Triton's interpreter.

Shape legend: R rows, E edges, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from psrl.runtime.outputs import VocabShard, edge_log_probs
from tests.helpers.parallel import Job, Layout, RankResult, run_job

BRANCHING = [0, 0, 0, 1, 2, 2, 3, 4, 5, 6]
"""Rows of edges, two of which branch."""


def edge_errors(
    rows: list[int], vocab: int, temperature: float, dtype: torch.dtype, device: str = "cpu", hidden: int = 128
) -> dict[str, float]:
    """Errors, over the largest value, of ``fused_edge_log_probs`` and its gradients on random rows and labels, against
    ``edge_log_probs`` of the same numbers' logits in float64."""
    from psrl.integrations.verl.engine.edge_outputs import fused_edge_log_probs

    torch.manual_seed(vocab)
    num_rows = max(rows) + 1
    hidden_RD, weight_VD = torch.randn(num_rows, hidden).to(dtype), 0.3 * torch.randn(vocab, hidden).to(dtype)
    edge_rows_E, labels_E = torch.tensor(rows), torch.randint(0, vocab, (len(rows),))
    labels_E[0], labels_E[-1] = vocab - 1, 0
    cotangents = torch.randn(2, len(rows))

    def logits(hidden_RD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy = edge_log_probs(
            hidden_RD @ weight_VD.T, torch.full((num_rows,), temperature), edge_rows_E, labels_E,
            shard=VocabShard(0, None), with_entropy=True,
        )  # fmt: skip
        assert entropy is not None
        return log_probs, entropy

    def fused(hidden_RD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        return fused_edge_log_probs(hidden_RD, weight_VD, temperature, edge_rows_E.to(device), labels_E.to(device))

    want = _outputs_and_grads(logits, hidden_RD.double(), weight_VD.double(), cotangents.double())
    got = _outputs_and_grads(fused, hidden_RD.to(device), weight_VD.to(device), cotangents.to(device))
    assert [x.dtype for x in got] == [torch.float32, torch.float32, dtype, dtype]
    names = ("log_probs", "entropy", "d hidden", "d weight")
    return {name: relative_error(mine, exact) for name, mine, exact in zip(names, got, want, strict=True)}


def _outputs_and_grads(compute: Callable[..., Any], hidden: Tensor, weight: Tensor, cotangents: Tensor) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = compute(hidden, weight)
    scalar = (log_probs * cotangents[0]).sum() + (entropy * cotangents[1]).sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(scalar, (hidden, weight))]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest value."""
    got, want = got.detach().cpu().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max())


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
            shapes.append((hidden.shape[0], hidden.shape[1]))
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


def compile_kernels(
    capability: int, *, num_edges: int, vocab: int = 151_936, parallel: bool = False, only: str = ""
) -> list[str]:
    """Compile the kernels of a forward and a backward in bfloat16 for a device that need not be there.

    Args:
        vocab: entries on a rank.
        parallel: of a tensor-parallel rank, the second.
        only: part of the names of those to compile.

    Returns:
        the names of what was compiled.
    """
    from psrl.runtime.attention.triton import aot

    launches = [x for x in _launches(capability, num_edges, vocab, parallel) if only in x.kernel.__name__]
    for launch in launches:
        aot.compile_launch(launch, capability)
    return [launch.kernel.__name__ for launch in launches]


def _launches(capability: int, num_edges: int, vocab: int, parallel: bool) -> Iterator[Any]:
    """As the host functions of verl/utils/kernel/kernels.py launch them."""
    from verl.utils.kernel import kernels

    from psrl.runtime.attention.triton.launch import Launch

    def launch(tuned: Any, *args: Any, **constants: Any) -> Launch:
        kernel, config = tuned.fn, tuned.configs[0]
        given = dict(zip((parameter.name for parameter in kernel.params), args, strict=False))
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return Launch(kernel, (1,), {**given, **constants, **config.kwargs}, options)

    hidden, columns, splits, rank = 1536, 9504, -(-vocab // 1024), int(parallel)
    rows, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (num_edges, vocab))
    labels, of_split = torch.empty(num_edges, dtype=torch.int64), torch.empty(num_edges, splits)
    of_edge = torch.empty(num_edges)
    by_split, by_edge = (of_split, splits, 1), (of_edge, 1)
    tma = {"USE_TMA": capability >= 90}
    yield launch(
        kernels.efficient_entropy_kernel_general_mainloop, rank, rows, weight, labels, num_edges, hidden, vocab, 1024,
        hidden, 1, hidden, 1, *by_split, *by_split, *by_split, *by_edge, of_edge, 0.5, **tma,
    )  # fmt: skip
    if parallel:
        yield launch(
            kernels.efficient_entropy_triton_kernel_epilogue_tp, num_edges, splits, *by_split, *by_split, *by_split,
            *by_split, *by_edge, *by_edge, *by_edge,
        )  # fmt: skip
        yield launch(
            kernels.efficient_entropy_triton_epilogue_tp_update, num_edges, *by_edge, *by_edge, *by_edge, *by_edge,
            *by_edge, of_edge, 0,
        )  # fmt: skip
    else:
        yield launch(
            kernels.efficient_entropy_triton_kernel_epilogue, *by_split, num_edges, splits, *by_edge, *by_split,
            *by_edge, *by_split, *by_edge, *by_edge, *by_edge, of_edge, 0,
        )  # fmt: skip
    d_logits = torch.empty(num_edges, columns, dtype=torch.bfloat16)
    yield launch(
        kernels.efficient_entropy_backward_kernel_general_d_logits_split_N, 1, num_edges, hidden, vocab, columns, rank,
        rows, hidden, 1, weight, hidden, 1, labels, 1, *by_edge, *by_edge, *by_edge, *by_edge, 0, *by_edge, d_logits,
        columns, 1, 0.5, **tma,
    )  # fmt: skip
