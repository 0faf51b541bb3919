"""The ``flash`` backend: the tiles of a layout as a few variable-length flash attention calls.

Triangles and rectangles whose queries and keys do not meet share a call, so that a tree takes one call for its
triangles and about one for every level of nesting. As in ``sdpa`` the results are merged by log-sum-exp in a fixed
order, and the backward pass runs the kernels' own backward with the merged output and log-sum-exp.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dim of q and k, W of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.errors import UnsupportedError
from psrl.runtime.attention.flash_kernels import Segments, VarlenKernel, varlen_kernel
from psrl.runtime.attention.kept import KeptResult, Made, made_once
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.tiling import Range, Tile
from psrl.runtime.transfer import to_device
from psrl.types import IntArray

DTYPES = (torch.bfloat16, torch.float16)


def flash_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKW: Tensor,
    layout: AttentionLayout,
    scale: float,
    place: KeptResult | None = None,
) -> Tensor:
    """[T, N, W], differentiable once.

    Raises:
        UnsupportedError: no kernel for this device, dtype or head dims.
    """
    kernel = varlen_kernel(q_TNH.device, q_TNH.shape[2], v_SKW.shape[2])
    if q_TNH.dtype not in DTYPES:
        raise UnsupportedError(
            f"attention backend 'flash' takes bfloat16 or float16, got {str(q_TNH.dtype).removeprefix('torch.')}: "
            "change the model's dtype, or set psrl.attention_backend=triton"
        )
    return varlen_attention(q_TNH, k_SKH, v_SKW, layout, scale, kernel, place)


def varlen_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKW: Tensor,
    layout: AttentionLayout,
    scale: float,
    kernel: VarlenKernel,
    place: KeptResult | None = None,
) -> Tensor:
    """``flash_attention`` on a kernel of the caller's choice."""
    return _VarlenAttention.apply(q_TNH, k_SKH, v_SKW, layout, scale, kernel, place)


class HostCall(NamedTuple):
    """Tiles of one kind that share no query and no key, ordered by query."""

    segments_q: tuple[Range, ...]
    segments_k: tuple[Range, ...]
    is_causal: bool


def plan_calls(tiles: Sequence[Tile], num_queries: int, num_keys: int) -> list[HostCall]:
    """Batch tiles: each goes to the first call after every earlier one that has a query or key of its own."""
    rounds: dict[tuple[bool, int], list[tuple[Range, Range]]] = {}
    next_q, next_k = {}, {}
    for is_causal in (True, False):
        next_q[is_causal], next_k[is_causal] = np.zeros(num_queries, np.int64), np.zeros(num_keys, np.int64)
    for tile in tiles:
        of_q = next_q[tile.is_causal][tile.q_start : tile.q_end]
        of_k = next_k[tile.is_causal][tile.k_start : tile.k_end]
        place = int(max(of_q.max(), of_k.max()))
        of_q[:] = of_k[:] = place + 1
        rounds.setdefault((not tile.is_causal, place), []).extend(_segments(tile))
    calls = []
    for (is_rectangle, _), segments in sorted(rounds.items()):
        segments.sort()
        calls.append(HostCall(tuple(q for q, _ in segments), tuple(k for _, k in segments), not is_rectangle))
    return calls


def _segments(tile: Tile) -> list[tuple[Range, Range]]:
    num_q, num_k = ((end - start) // tile.batch for start, end in (tile[:2], tile[2:4]))
    return [
        (
            (tile.q_start + i * num_q, tile.q_start + (i + 1) * num_q),
            (tile.k_start + i * num_k, tile.k_start + (i + 1) * num_k),
        )
        for i in range(tile.batch)
    ]


class Rows(NamedTuple):
    """Tokens of a call: a contiguous range, or else their indices on the device."""

    start: int
    stop: int
    places: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        return x[self.start : self.stop] if self.places is None else x.index_select(0, self.places)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Rows of one call are distinct, so this is deterministic."""
        if self.places is None:
            x[self.start : self.stop].copy_(values)
        else:
            x.index_copy_(0, self.places, values)

    def add(self, x: Tensor, values: Tensor) -> None:
        if self.places is None:
            x[self.start : self.stop].add_(values)
        else:
            x.index_copy_(0, self.places, self.take(x).add_(values))


class Call(NamedTuple):
    q: Rows
    k: Rows
    segments: Segments


def device_calls(layout: AttentionLayout, device: torch.device) -> list[Call]:
    """The layout's calls with their offsets on ``device``, made once."""
    key = ("flash_calls", device)
    if key not in layout.derived:
        layout.derived[key] = [
            _device_call(call, device) for call in plan_calls(layout.tiles, layout.num_queries, layout.num_keys)
        ]
    return layout.derived[key]


def _device_call(call: HostCall, device: torch.device) -> Call:
    (q, cu_q, max_q), (k, cu_k, max_k) = (_rows(ranges, device) for ranges in (call.segments_q, call.segments_k))
    return Call(q, k, Segments(cu_q, cu_k, max_q, max_k, call.is_causal))


def _rows(ranges: Sequence[Range], device: torch.device) -> tuple[Rows, Tensor, int]:
    starts, stops = np.array(ranges).T
    lengths = stops - starts
    offsets: IntArray = np.r_[0, np.cumsum(lengths)]
    index = None
    if (starts[1:] != stops[:-1]).any():
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        index = to_device(places, device)
    cu = to_device(offsets.astype(np.int32), device)
    return Rows(int(starts[0]), int(stops[-1]), index), cu, int(lengths.max())


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKW: Tensor,
        layout: AttentionLayout,
        scale: float,
        kernel: VarlenKernel,
        place: KeptResult | None,
    ) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_SKH, v_SKW))
        calls = device_calls(layout, q.device)
        out_TNW, lse_TN, *extra = made_once(place, lambda: _forward_calls(q, k, v, calls, scale, kernel))
        ctx.save_for_backward(q, k, v, out_TNW, lse_TN, *extra)
        ctx.layout, ctx.scale, ctx.kernel, ctx.calls = layout, scale, kernel, calls
        return out_TNW

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # autograd's parameter names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_TN, *extra = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        grads = dq, dk, dv = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        for call in ctx.calls:
            of_queries = [call.q.take(x) for x in (grad_out, q, out)]
            lse = call.q.take(lse_TN).t()
            parts = ctx.kernel.backward(
                of_queries[0], of_queries[1], call.k.take(k), call.k.take(v), of_queries[2], lse, call.segments,
                ctx.scale, tuple(extra),
            )  # fmt: skip
            for rows, total, part in zip((call.q, call.k, call.k), (dq, dk, dv), parts, strict=True):
                rows.add(total, part)
        if ctx.layout.is_constant:
            # Exactly zero, where the kernels leave rounding noise.
            dq.zero_()
            dk.zero_()
        return (*(grad.to(q.dtype) for grad in grads), None, None, None, None)


def _forward_calls(q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call], scale: float, kernel: VarlenKernel) -> Made:
    """Output [T, N, W] and log-sum-exp [T, N] over all keys, and the kernel's extra tensors."""
    out = q.new_zeros((len(q), q.shape[1], v.shape[2]), dtype=torch.float32)
    lse_TN = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    extra: tuple[Tensor, ...] = ()
    for call in calls:
        part, part_lse, extra = kernel.forward(call.q.take(q), call.k.take(k), call.k.take(v), call.segments, scale)
        part_lse_TN, before_TN = part_lse.t(), call.q.take(lse_TN)
        # The call's share of the softmax over the keys so far; 1 where there were none.
        share = torch.sigmoid(part_lse_TN - before_TN).unsqueeze(-1)
        call.q.put(out, call.q.take(out).lerp(part.float(), share))
        call.q.put(lse_TN, torch.logaddexp(before_TN, part_lse_TN))
    return out.to(q.dtype), lse_TN, *extra
