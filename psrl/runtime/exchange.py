"""Where a layer's K/V meet the cache: write in pass 1, read the path, accumulate and tap gradients in pass 2.

A cache that stores leaves too gets their K/V in the forward of pass 2.

Under context parallelism a rank brings the K/V of its tokens and its shards of the path, and gets those of all ranks;
in the backward it gets the sum over ranks of its tokens' and shards' gradients.

Shape legend: T local tokens, padding at the end included, t of them on this rank, n of them without padding, P path
tokens, s of them stored on this rank, K kv heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psrl.cache import KVCache, KVPair, accumulator_dtype
from psrl.runtime.context import ContextPart
from psrl.runtime.session import Execution
from psrl.types import MicroBatch


def exchange_kv(execution: Execution, layer: int, k_TKH: Tensor, v_TKH: Tensor) -> KVPair:
    """The keys and values that the micro-batch attends to: ``[path | local]``, [P + T, K, H].

    Pass 1 writes a spine micro-batch's K/V to the cache. In pass 2 the returned pair is differentiable: its backward
    adds the path's gradients to the cache and adds to the local gradients what descendants accumulated (the KV tap).

    Where attention reads the path in its blocks (``execution.path_tables``), the pair is the local one, [T, K, H]. Then
    attention adds the path's gradients to the cache itself, in pass 2 before the tap's backward, and in pass 1 calls
    ``end_layer`` when it has read the path.

    Args:
        layer: index among the layers of this model chunk.
        k_TKH, v_TKH: [t, K, H] under context parallelism. Then collective over the context-parallel group.
    """
    mb = execution.micro_batch.plan
    if execution.backward and torch.is_grad_enabled() and not k_TKH.requires_grad:
        # Nothing before them is trained (adapters of later layers only), but their backward keeps the cache's books.
        k_TKH, v_TKH = k_TKH.detach().requires_grad_(), v_TKH.detach().requires_grad_()
    if execution.micro_batch.context is not None:
        if execution.backward:
            return KVPair(*_ContextPathAndTap.apply(k_TKH, v_TKH, execution, layer))
        return _gather_and_write(execution, execution.micro_batch.context, layer, KVPair(k_TKH, v_TKH))
    if not mb.path_blocks and not mb.own_blocks:
        return KVPair(k_TKH, v_TKH)
    if execution.backward:
        return KVPair(*_PathAndTap.apply(k_TKH, v_TKH, execution, layer))
    cache = execution.cache
    if mb.own_blocks:
        cache.write(mb.index, layer, k_TKH, v_TKH)
    if execution.path_tables is not None:
        return KVPair(k_TKH, v_TKH)
    pair = cache.read(mb.index, layer, k_TKH, v_TKH)
    end_layer(execution)
    return pair


def end_layer(execution: Execution) -> None:
    """The cache is not needed any more for one layer of an execution. With the last, path tables are dropped."""
    is_last = execution.cache.end_layer(execution.micro_batch.plan.index, backward=execution.backward)
    if is_last and execution.path_tables is not None:
        execution.path_tables.drop()


def _end_backward(execution: Execution, layer: int) -> None:
    """The layer's attention has run its backward too: it comes before that of what made its keys."""
    end_layer(execution)
    if execution.kept is not None:
        execution.kept.drop(execution.micro_batch.plan.index, layer)


class _PathAndTap(torch.autograd.Function):
    """Activation recompute may run the forward twice: it reads, and what a leaf stores is the same again. Where
    attention reads the path in its blocks, this is the tap alone."""

    @staticmethod
    def forward(ctx: Any, k_TKH: Tensor, v_TKH: Tensor, execution: Execution, layer: int) -> tuple[Tensor, Tensor]:
        ctx.execution, ctx.layer = execution, layer
        mb = execution.micro_batch.plan
        if not mb.is_spine:
            execution.cache.write(mb.index, layer, k_TKH, v_TKH)
        if not mb.path_blocks or execution.path_tables is not None:
            return k_TKH.view_as(k_TKH), v_TKH.view_as(v_TKH)
        pair = execution.cache.read(mb.index, layer, k_TKH, v_TKH)
        return pair.k, pair.v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dk_SKH, dv_SKH = grad_outputs
        mb, cache, layer = ctx.execution.micro_batch.plan, ctx.execution.cache, ctx.layer
        path_len = mb.path_len if ctx.execution.path_tables is None else 0
        if path_len:
            cache.add_grads(mb.index, layer, dk_SKH[:path_len], dv_SKH[:path_len])
        dk_TKH, dv_TKH = dk_SKH[path_len:], dv_SKH[path_len:]
        if mb.is_spine:
            tapped = cache.own_grads(mb.index, layer)
            dk_TKH, dv_TKH = _add_leading(dk_TKH, tapped.k), _add_leading(dv_TKH, tapped.v)
        _end_backward(ctx.execution, layer)
        return dk_TKH, dv_TKH, None, None


def _gather_and_write(execution: Execution, context: ContextPart, layer: int, local: KVPair) -> KVPair:
    """Pass 1 under context parallelism."""
    mb, cache = execution.micro_batch.plan, execution.cache
    pair = KVPair(*(context.gather(x) for x in _behind_path(execution, layer, local)))
    if mb.own_blocks:
        cache.write(mb.index, layer, pair.k[mb.path_len :], pair.v[mb.path_len :])
    if mb.own_blocks or mb.path_blocks:
        end_layer(execution)
    return pair


class _ContextPathAndTap(torch.autograd.Function):
    """As ``_PathAndTap``, with a gather over the context-parallel group and its adjoint."""

    @staticmethod
    def forward(ctx: Any, k_tKH: Tensor, v_tKH: Tensor, execution: Execution, layer: int) -> tuple[Tensor, Tensor]:
        context = execution.micro_batch.context
        assert context is not None
        ctx.execution, ctx.layer, ctx.context, ctx.num_tokens = execution, layer, context, len(k_tKH)
        pair = _behind_path(execution, layer, KVPair(k_tKH, v_tKH))
        return context.gather(pair.k), context.gather(pair.v)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mb, cache, layer = ctx.execution.micro_batch.plan, ctx.execution.cache, ctx.layer
        context: ContextPart = ctx.context
        num_stored = cache.num_stored(mb.path_blocks)
        partial = _with_tap(KVPair(*grad_outputs), mb, cache, layer, context)
        dk_rKH, dv_rKH = (context.scatter_sum(grad, num_stored + ctx.num_tokens) for grad in partial)
        if mb.path_blocks:
            cache.add_grads(mb.index, layer, dk_rKH[:num_stored], dv_rKH[:num_stored])
        if mb.path_blocks or mb.own_blocks:
            _end_backward(ctx.execution, layer)
        dk_tKH, dv_tKH = dk_rKH[num_stored:].to(grad_outputs[0].dtype), dv_rKH[num_stored:].to(grad_outputs[1].dtype)
        return dk_tKH, dv_tKH, None, None


def _behind_path(execution: Execution, layer: int, local: KVPair) -> KVPair:
    """[s + t] K/V that this rank brings. A dummy micro-batch is not known to the cache."""
    mb = execution.micro_batch.plan
    return execution.cache.read(mb.index, layer, *local) if mb.path_blocks else local


def _with_tap(grads: KVPair, mb: MicroBatch, cache: KVCache, layer: int, context: ContextPart) -> KVPair:
    """[P + T] gradients from this rank's queries and its shards of the accumulators, in the accumulators' precision."""
    wide = KVPair(*(x.to(accumulator_dtype(x.dtype)) for x in grads))
    if not mb.own_blocks:
        return wide
    tapped = cache.own_grads(mb.index, layer)
    return KVPair(*(
        x.index_add(0, context.tap_keys, tap[context.tap_rows]) for x, tap in zip(wide, tapped, strict=True)
    ))  # fmt: skip


def _add_leading(grad_TKH: Tensor, tapped_nKH: Tensor) -> Tensor:
    """``grad`` with the accumulated gradient added to its first n tokens, in the accumulator's precision."""
    num_tokens = len(tapped_nKH)
    total_nKH = (grad_TKH[:num_tokens] + tapped_nKH).to(grad_TKH.dtype)
    return total_nKH if num_tokens == len(grad_TKH) else torch.cat([total_nKH, grad_TKH[num_tokens:]])
