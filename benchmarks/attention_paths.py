"""Attention of one layer to a cached path in blocks: read where it is, or gathered in front of the local keys.

Shape legend: T queries, S keys, P path keys, L local keys, n keys of a block, N query heads, K key/value heads, H head
dim of q and k, W of v.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from attention_forests import Shape
from torch import Tensor

from psrl.cache import accumulator_dtype
from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton import CachedPath, PathGrads

WAYS = ("in_place", "gathered")


class CachedBlocks(NamedTuple):
    """A path as the K/V cache holds it, of one layer: blocks [1, n, K, H] and [1, n, K, W], accumulators alike."""

    k: list[Tensor]
    v: list[Tensor]
    dk: list[Tensor]
    dv: list[Tensor]

    @classmethod
    def random(cls, path_len: int, num_blocks: int, shape: Shape) -> CachedBlocks:
        """Normal keys and values of ``path_len`` tokens in blocks of about equal size; accumulators of zeros."""
        bounds = [path_len * block // num_blocks for block in range(num_blocks + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]

        def blocks(head_dim: int) -> list[Tensor]:
            rows = [(1, size, shape.num_kv_heads, head_dim) for size in sizes]
            return [torch.randn(row, device=shape.device, dtype=shape.dtype) for row in rows]

        k, v = blocks(shape.head_dim), blocks(shape.v_head_dim)
        accumulators = [[torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in part] for part in (k, v)]
        return cls(k, v, *accumulators)

    def attention(self, way: str, layout: AttentionLayout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """[T, N, W] of q [T, N, H] and local k [L, K, H] and v [L, K, W]. A backward adds to the accumulators.

        In place, the tables of row addresses are built here: a micro-batch builds them once for all layers.

        Raises:
            UnsupportedError: Triton is not installed.
        """
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError("needs Triton")
        if way == "gathered":
            return functools.partial(self._gathered, layout)
        from psrl.runtime.attention.triton import CachedPath, PathGrads

        path, grads = CachedPath.build(self.k, self.v), PathGrads.build(self.dk, self.dv)
        # Bound to the blocks, which have to stay as long as the tables of their addresses.
        return functools.partial(self._in_place, layout, path, grads)

    def _gathered(self, layout: AttentionLayout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_SKH, v_SKW = _Gather.apply(k, v, self)
        return attend_layout(q, k_SKH, v_SKW, layout, backend="triton")

    def _in_place(
        self, layout: AttentionLayout, path: CachedPath, grads: PathGrads, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        from psrl.runtime.attention.triton import attend_path

        return attend_path(q, k, v, layout, path, 0, lambda: grads)


class _Gather(torch.autograd.Function):
    """As ``KVCache.read`` and ``add_grads`` do it."""

    @staticmethod
    def forward(ctx: Any, k_LKH: Tensor, v_LKW: Tensor, blocks: CachedBlocks) -> tuple[Tensor, Tensor]:
        ctx.blocks = blocks
        k_SKH = torch.cat([*(x[0] for x in blocks.k), k_LKH])
        return k_SKH, torch.cat([*(x[0] for x in blocks.v), v_LKW])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        local = []
        for grad, totals in zip(grads, (ctx.blocks.dk, ctx.blocks.dv), strict=True):
            start = 0
            for total in totals:
                stop = start + total.shape[1]
                total[0].add_(grad[start:stop])
                start = stop
            local.append(grad[start:])
        return local[0], local[1], None
