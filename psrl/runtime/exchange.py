"""Where a layer's K/V meet the cache: write in pass 1, read the path, accumulate and tap gradients in pass 2.

Shape legend: T local tokens, padding at the end included, n of them without padding, P path tokens, K kv heads, H head
dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psrl.cache import KVPair
from psrl.runtime.session import Execution


def exchange_kv(execution: Execution, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> KVPair:
    """The keys and values that the micro-batch attends to: ``[path | local]``, [P + T, K, H].

    Pass 1 writes a spine micro-batch's K/V to the cache. In pass 2 the returned pair is differentiable: its backward
    adds the path's gradients to the cache and adds to the local gradients what descendants accumulated (the KV tap).

    Args:
        layer: index among the layers of this model chunk.
    """
    mb = execution.micro_batch.plan
    if not mb.path_blocks and not mb.own_blocks:
        return KVPair(k_TKH, v_TKH)
    if execution.backward:
        return KVPair(*_PathAndTap.apply(k_TKH, v_TKH, execution, layer))
    cache = execution.cache
    if mb.own_blocks:
        cache.write(mb.index, layer, k_TKH, v_TKH)
    pair = cache.read(mb.index, layer, k_TKH, v_TKH)
    cache.end_layer(mb.index, backward=False)
    return pair


class _PathAndTap(torch.autograd.Function):
    """Forward reads and changes nothing, so that activation recompute may run it twice."""

    @staticmethod
    def forward(ctx: Any, k_TKH: Tensor, v_TKH: Tensor, execution: Execution, layer: int) -> tuple[Tensor, Tensor]:
        ctx.execution, ctx.layer = execution, layer
        mb = execution.micro_batch.plan
        pair = execution.cache.read(mb.index, layer, k_TKH, v_TKH)
        if not mb.path_blocks:
            return k_TKH.view_as(k_TKH), v_TKH.view_as(v_TKH)
        return pair.k, pair.v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dk_SKH, dv_SKH = grad_outputs
        mb, cache, layer = ctx.execution.micro_batch.plan, ctx.execution.cache, ctx.layer
        path_len = mb.path_len
        if path_len:
            cache.add_grads(mb.index, layer, dk_SKH[:path_len], dv_SKH[:path_len])
        dk_TKH, dv_TKH = dk_SKH[path_len:], dv_SKH[path_len:]
        if mb.own_blocks:
            tapped = cache.own_grads(mb.index, layer)
            dk_TKH, dv_TKH = _add_leading(dk_TKH, tapped.k), _add_leading(dv_TKH, tapped.v)
        cache.end_layer(mb.index, backward=True)
        return dk_TKH, dv_TKH, None, None


def _add_leading(grad_TKH: Tensor, tapped_nKH: Tensor) -> Tensor:
    """``grad`` with the accumulated gradient added to its first n tokens, in the accumulator's precision."""
    num_tokens = len(tapped_nKH)
    total_nKH = (grad_TKH[:num_tokens] + tapped_nKH).to(grad_TKH.dtype)
    return total_nKH if num_tokens == len(grad_TKH) else torch.cat([total_nKH, grad_TKH[num_tokens:]])
