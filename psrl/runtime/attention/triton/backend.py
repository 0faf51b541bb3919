"""The ``triton`` backend: autograd around the launches, over dense keys or over the blocks of a cached path.

Shape legend: T queries, S keys, L local keys, N query heads, K key/value heads, H head dim of q and k, W of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import knobs

from psrl.errors import UnsupportedError
from psrl.runtime.attention.kept import KeptResult, Made, made_once
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.triton.configs import KernelConfig, kernel_config
from psrl.runtime.attention.triton.launch import (
    Backward,
    Keys,
    delta_launch,
    dkv_launches,
    dq_launches,
    forward_launches,
)
from psrl.runtime.attention.triton.path import ALIGNMENT, CachedPath, RowTable, row_table

INTERPRETER_MAJOR = 9
"""Whose tiles the interpreter runs."""


class PathGrads(NamedTuple):
    """The accumulators of a path's blocks, float32: [layers, n, K, H] and [layers, n, K, W] each."""

    dk: RowTable
    dv: RowTable

    @classmethod
    def build(
        cls, dk_blocks: Sequence[Tensor], dv_blocks: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> PathGrads:
        """
        Args:
            dk_blocks, dv_blocks: the accumulators from the root on, as long as the blocks; see ``row_table``.

        Raises:
            UnsupportedError: they are not float32.
        """
        tables = cls(row_table(dk_blocks, sizes), row_table(dv_blocks, sizes))
        for table in tables:
            if table.dtype != torch.float32:
                raise UnsupportedError(f"the kernels add to float32 accumulators, got {table.dtype}")
        return tables


def triton_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKW: Tensor,
    layout: AttentionLayout,
    scale: float,
    place: KeptResult | None = None,
) -> Tensor:
    """[T, N, W], differentiable once; v may have its own head dim. Deterministic: no atomics.

    Raises:
        UnsupportedError: no kernel for this device, dtype or head dim.
    """
    return _attend(q_TNH, k_SKH, v_SKW, layout, scale, None, 0, None, place)[0]


def attend_path(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKW: Tensor,
    layout: AttentionLayout,
    path: CachedPath,
    layer: int,
    path_grads: Callable[[], PathGrads] | None,
    scale: float | None = None,
    place: KeptResult | None = None,
) -> Tensor:
    """[T, N, W]: attention to a cached path and local tokens, where the path stays in its blocks (no gather).

    The backward pass adds the path's dK and dV to the accumulators in place, in float32, and returns gradients of q
    and of the local k and v only.

    Args:
        layout: over P + L keys, the path's first.
        layer: layer of the blocks that is read and whose accumulators are added to.
        path_grads: called once in the backward pass for the accumulators; None where no backward follows.
        scale: factor of the scores; None means ``H ** -0.5``.
        place: where the result is kept or read; see ``made_once``.

    Raises:
        UnsupportedError: no kernel for this device, dtype or head dim; the local k and v do not fit the path's.
        ValueError: the layout's lengths are not those of q, and of path and k.
    """
    if layout.num_queries != len(q_TNH) or layout.num_keys != path.num_tokens + len(k_LKH):
        raise ValueError(
            f"the layout is for {layout.num_queries} queries and {layout.num_keys} keys, "
            f"got {len(q_TNH)} and {path.num_tokens} + {len(k_LKH)}"
        )
    for table, x in ((path.k, k_LKH), (path.v, v_LKW)):
        if (table.num_heads, table.head_dim, table.dtype) != (*x.shape[1:], x.dtype):
            raise UnsupportedError(
                f"cached blocks of {table.num_heads} heads of {table.head_dim} in {table.dtype} do not fit local keys "
                f"of {x.shape[1]} heads of {x.shape[2]} in {x.dtype}"
            )
    factor = q_TNH.shape[2] ** -0.5 if scale is None else float(scale)
    return _attend(q_TNH, k_LKH, v_LKW, layout, factor, path, layer, path_grads, place)[0]


def attention_and_lse(
    q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """``triton_attention`` and the log-sum-exp of the scaled scores, [N, T] float32 (-inf for a query without keys)."""
    return _attend(q_TNH, k_SKH, v_SKW, layout, scale, None, 0, None, None)


def _attend(
    q_TNH: Tensor,
    k_LKH: Tensor,
    v_LKW: Tensor,
    layout: AttentionLayout,
    scale: float,
    path: CachedPath | None,
    layer: int,
    path_grads: Callable[[], PathGrads] | None,
    place: KeptResult | None,
) -> tuple[Tensor, Tensor]:
    if q_TNH.device.type != "cuda" and not knobs.runtime.interpret:
        raise UnsupportedError(
            f"attention backend 'triton' runs on cuda, got tensors on {q_TNH.device.type}: set "
            "psrl.attention_backend to sdpa (TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, for tests)"
        )
    major = torch.cuda.get_device_capability(q_TNH.device)[0] if q_TNH.is_cuda else INTERPRETER_MAJOR
    config = kernel_config(q_TNH.shape[2], v_LKW.shape[2], q_TNH.dtype, major)
    return _IntervalAttention.apply(q_TNH, k_LKH, v_LKW, layout, scale, config, path, layer, path_grads, place)


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKW: Tensor,
        layout: AttentionLayout,
        scale: float,
        config: KernelConfig,
        path: CachedPath | None,
        layer: int,
        path_grads: Callable[[], PathGrads] | None,
        place: KeptResult | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_aligned(x) for x in (q_TNH, k_LKH, v_LKW))

        def make() -> Made:
            num_queries, num_heads, _ = q.shape
            out = q.new_empty((num_queries, num_heads, v.shape[2]))
            lse = q.new_empty((num_heads, num_queries), dtype=torch.float32)
            if num_queries:
                for launch in forward_launches(q, Keys(k, v, path, layer), out, lse, layout, scale, config):
                    launch.run()
            return out, lse

        out, lse = made_once(place, make)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.config = layout, scale, config
        ctx.path, ctx.layer, ctx.path_grads = path, layer, path_grads
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # autograd's parameter names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = _aligned(grad_outputs[0])
        delta = torch.empty_like(lse)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        path_dk, path_dv = ctx.path_grads() if ctx.path is not None else (None, None)
        if len(q):
            inputs = Backward(
                q, Keys(k, v, ctx.path, ctx.layer), grad_out, lse, delta, ctx.layout, ctx.scale, ctx.config
            )
            launches = [delta_launch(out, grad_out, delta), *dq_launches(inputs, dq)]
            if ctx.layout.num_keys:
                launches += dkv_launches(inputs, dk, dv, path_dk, path_dv)
            for launch in launches:
                launch.run()
        else:
            dk.zero_()
            dv.zero_()
        return dq, dk, dv, *(None,) * 7


def _aligned(x: Tensor) -> Tensor:
    """``x``, copied unless rows and heads start at multiples of 16 elements, so that every call runs one kernel."""
    is_aligned = x.stride(2) == 1 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0
    return x if is_aligned and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
