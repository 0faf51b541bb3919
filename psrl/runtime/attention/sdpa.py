"""Attention under an interval mask on dense flash kernels: tile by tile, merged by log-sum-exp in a fixed order.

The forward pass keeps the softmax's log-sum-exp over all keys of a query. The backward pass runs the kernels' own
backward on each tile with the merged output and log-sum-exp, as ring attention does (Liu et al., 2023, section 3), and
sums the tiles' gradients. Work is proportional to visible pairs; no mask is ever made.

Inside, tensors are ``[1, heads, tokens, head dim]`` views of ``[tokens, heads, head dim]`` storage, the kernels'
calling convention.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.errors import UnsupportedError
from psrl.runtime.attention.kernels import FlashKernel, flash_kernel
from psrl.runtime.attention.layout import AttentionLayout


def sdpa_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[T, N, H], differentiable once.

    Raises:
        UnsupportedError: no kernel for this device and dtype, or v has another head dimension than q and k.
    """
    if v_SKH.shape[2] != q_TNH.shape[2]:
        raise UnsupportedError(
            f"attention backend 'sdpa' takes one head dim for q, k and v, got {q_TNH.shape[2]} and {v_SKH.shape[2]}"
        )
    kernel = flash_kernel(q_TNH.device, q_TNH.dtype)
    return _TiledAttention.apply(q_TNH, k_SKH, v_SKH, layout, scale, kernel)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, layout: AttentionLayout, scale: float, kernel: FlashKernel
    ) -> Tensor:
        q, k, v = (_heads_first(x, layout, kernel) for x in (q_TNH, k_SKH, v_SKH))
        if layout.is_single_call:
            tile = layout.tiles[0]
            parts = (_split(x, tile.batch) for x in (q, k, v))
            out, lse, extra = kernel.forward(*parts, tile.is_causal, scale)
            out, lse = _join(out), lse.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        else:
            out, lse, extra = _forward_tiles(q, k, v, layout, scale, kernel)
        out_TNH = out[0].transpose(0, 1).to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_SKH, v_SKH, out_TNH, lse, *extra)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_TNH: Tensor) -> tuple[Tensor | None, ...]:
        q_TNH, k_SKH, v_SKH, out_TNH, lse, *extra = ctx.saved_tensors
        layout, scale, kernel = ctx.layout, ctx.scale, ctx.kernel
        grad_out, q, k, v, out = (
            _heads_first(x, layout, kernel) for x in (grad_out_TNH, q_TNH, k_SKH, v_SKH, out_TNH)
        )
        grads = _backward_tiles(grad_out, q, k, v, out, lse, layout, scale, kernel, tuple(extra))
        dtype = q_TNH.dtype
        return (*(grad[0].transpose(0, 1).to(dtype) for grad in grads), None, None, None)
