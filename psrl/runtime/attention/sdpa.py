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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.runtime.attention.kept import KeptResult, Made, made_once
from psrl.runtime.attention.kernels import FlashKernel, flash_kernel
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.tiling import Tile


def sdpa_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    layout: AttentionLayout,
    scale: float,
    place: KeptResult | None = None,
) -> Tensor:
    """[T, N, head dim of v], differentiable once.

    The kernels take one head dim for q, k and v: where they differ, zeros fill up the smaller, which changes no result.

    Raises:
        UnsupportedError: no kernel for this device and dtype.
    """
    kernel = flash_kernel(q_TNH.device, q_TNH.dtype)
    value_dim = v_SKH.shape[2]
    head_dim = max(q_TNH.shape[2], value_dim)
    padded = (F.pad(x, (0, head_dim - x.shape[2])) if x.shape[2] < head_dim else x for x in (q_TNH, k_SKH, v_SKH))
    out_TNH = _TiledAttention.apply(*padded, layout, scale, kernel, place)
    return out_TNH if value_dim == head_dim else out_TNH[..., :value_dim]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        layout: AttentionLayout,
        scale: float,
        kernel: FlashKernel,
        place: KeptResult | None,
    ) -> Tensor:
        def make() -> Made:
            dtype = _compute_dtype(q_TNH.dtype, layout, kernel)
            q, k, v = (_heads_first(x, dtype) for x in (q_TNH, k_SKH, v_SKH))
            out, lse, extra = _forward_tiles(q, k, v, layout, scale, kernel)
            return _tokens_first(out, q_TNH.dtype), lse, *extra

        out_TNH, lse, *extra = made_once(place, make)
        ctx.save_for_backward(q_TNH, k_SKH, v_SKH, out_TNH, lse, *extra)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out_TNH

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator loses parameter names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_TNH, k_SKH, v_SKH, out_TNH, lse, *extra = ctx.saved_tensors
        dtype = _compute_dtype(q_TNH.dtype, ctx.layout, ctx.kernel)
        grad_out, q, k, v, out = (_heads_first(x, dtype) for x in (*grad_outputs, q_TNH, k_SKH, v_SKH, out_TNH))
        grads = _backward_tiles(grad_out, q, k, v, out, lse, ctx.layout, ctx.scale, ctx.kernel, tuple(extra))
        if ctx.layout.is_constant:
            # Exactly zero, where the kernels leave rounding noise.
            grads = [grads[0].zero_(), grads[1].zero_(), grads[2]]
        return (*(_tokens_first(grad, q_TNH.dtype) for grad in grads), None, None, None, None)


def _forward_tiles(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, kernel: FlashKernel
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output [1, N, T, H] and log-sum-exp [1, N, T] over all keys, and the kernel's extra tensors."""
    if layout.is_single_call:
        return _forward_tile(q, k, v, layout.tiles[0], scale, kernel)
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _empty_like(q, sum_dtype)
    lse = q.new_empty((q.shape[2], q.shape[1]), dtype=sum_dtype).t().unsqueeze(0)
    for start, end in layout.unset_queries:
        out[:, :, start:end].zero_()
        lse[:, :, start:end].fill_(float("-inf"))
    extra: tuple[Tensor, ...] = ()
    for tile in layout.tiles:
        num_queries, num_keys = tile.q_end - tile.q_start, tile.k_end - tile.k_start
        q_tile = q.narrow(2, tile.q_start, num_queries)
        k_tile, v_tile = k.narrow(2, tile.k_start, num_keys), v.narrow(2, tile.k_start, num_keys)
        tile_out, tile_lse, extra = _forward_tile(q_tile, k_tile, v_tile, tile, scale, kernel)
        out_rows, lse_rows = out.narrow(2, tile.q_start, num_queries), lse.narrow(2, tile.q_start, num_queries)
        if tile.is_new_q:
            out_rows.copy_(tile_out)
            lse_rows.copy_(tile_lse)
        else:
            # The tile's share of the softmax over the keys so far: exp(b) / (exp(a) + exp(b)); 1 where a is -inf.
            share = torch.sigmoid(tile_lse - lse_rows)
            out_rows.lerp_(tile_out.to(sum_dtype), share.unsqueeze(-1))
            torch.logaddexp(lse_rows, tile_lse, out=lse_rows)
    return out, lse, extra


def _forward_tile(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float, kernel: FlashKernel
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    q, k, v = (_split(x, tile.batch) for x in (q, k, v))
    out, lse, extra = kernel.forward(q, k, v, tile.is_causal, scale)
    return _join(out), _join(lse), extra


def _backward_tiles(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scale: float,
    kernel: FlashKernel,
    extra: tuple[Tensor, ...],
) -> list[Tensor]:
    """Gradients of q [1, N, T, H], k and v [1, K, S, H]."""
    if layout.is_single_call:
        return _backward_tile((grad_out, q, out, lse), (k, v), layout.tiles[0], scale, kernel, extra)
    sum_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grads = grad_q, grad_k, grad_v = [_empty_like(x, sum_dtype) for x in (q, k, v)]
    for start, end in layout.unset_queries:
        grad_q[:, :, start:end].zero_()
    for start, end in layout.unset_keys:
        grad_k[:, :, start:end].zero_()
        grad_v[:, :, start:end].zero_()
    for tile in layout.tiles:
        queries, keys = (tile.q_start, tile.q_end - tile.q_start), (tile.k_start, tile.k_end - tile.k_start)
        of_queries = tuple(x.narrow(2, *queries) for x in (grad_out, q, out, lse))
        of_keys = tuple(x.narrow(2, *keys) for x in (k, v))
        parts = _backward_tile(of_queries, of_keys, tile, scale, kernel, extra)
        for grad, part, rows, is_new in zip(
            grads, parts, (queries, keys, keys), (tile.is_new_q, tile.is_new_k, tile.is_new_k), strict=True
        ):
            target = grad.narrow(2, *rows)
            if is_new:
                target.copy_(part)
            else:
                target.add_(part)
    return grads


def _backward_tile(
    of_queries: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    tile: Tile,
    scale: float,
    kernel: FlashKernel,
    extra: tuple[Tensor, ...],
) -> list[Tensor]:
    """``of_queries``: output gradient, q, output, log-sum-exp over all keys; ``of_keys``: k, v."""
    grad_out, q, out, lse = (_split(x, tile.batch) for x in of_queries)
    k, v = (_split(x, tile.batch) for x in of_keys)
    return [_join(x) for x in kernel.backward(grad_out, q, k, v, out, lse, tile.is_causal, scale, extra)]


def _compute_dtype(dtype: torch.dtype, layout: AttentionLayout, kernel: FlashKernel) -> torch.dtype:
    """Rounding every tile's output to half precision would lose more than one unshared call does."""
    widen = kernel.widens_half and layout.has_merges and dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if widen else dtype


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, H] -> [1, heads, tokens, H], a view unless the kernels cannot read these strides."""
    x = x.to(dtype)
    if x.stride(2) != 1 or x.stride(0) < x.shape[2]:
        x = x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, H] -> [tokens, heads, H]."""
    return x.squeeze(0).transpose(0, 1).to(dtype)


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, H], stored as [tokens, heads, H]."""
    _, num_heads, num_tokens, head_dim = x.shape
    return x.new_empty((num_tokens, num_heads, head_dim), dtype=dtype).transpose(0, 1).unsqueeze(0)


def _split(x: Tensor, batch: int) -> Tensor:
    """[1, heads, batch * n, ...] -> [batch, heads, n, ...], a view."""
    return x if batch == 1 else x.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)


def _join(x: Tensor) -> Tensor:
    """[batch, heads, n, ...] -> [1, heads, batch * n, ...]."""
    return x if x.shape[0] == 1 else x.transpose(0, 1).flatten(1, 2).unsqueeze(0)
