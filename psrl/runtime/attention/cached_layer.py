"""Attention of one layer to a cached path in blocks, on made-up numbers: for measurements.

The path is read where it is, or gathered in front of the local keys, as a layer of a model does.

Shape legend: T queries, S keys, L local keys, n keys of a block, N query heads, K key/value heads, H head dim of q and
k, W of v.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from psrl.cache import accumulator_dtype
from psrl.cost import ModelShape
from psrl.errors import UnsupportedError
from psrl.runtime.attention.dispatch import attend_layout
from psrl.runtime.attention.layout import AttentionLayout

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton import CachedPath, PathGrads


class LayerShape(NamedTuple):
    """Of one rank's attention in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_model(cls, model: ModelShape, tensor_parallel: int, dtype: torch.dtype, device: torch.device) -> LayerShape:
        """Of one tensor-parallel rank. Latent attention makes keys and values for every head."""
        heads, latent = model.num_heads // tensor_parallel, model.latent
        if latent is not None:
            return cls(heads, heads, latent.plain_dim + latent.rotary_dim, latent.value_dim, dtype, device)
        kv_heads = max(1, model.num_kv_heads // tensor_parallel)
        return cls(heads, kv_heads, model.head_dim, model.head_dim, dtype, device)

    def inputs(self, num_queries: int, num_keys: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Normal q [T, N, H], k [S, K, H], v [S, K, W] and output gradient [T, N, W]; no leaf asks for gradients."""
        shapes = [
            (num_queries, self.num_heads, self.head_dim),
            (num_keys, self.num_kv_heads, self.head_dim),
            (num_keys, self.num_kv_heads, self.v_head_dim),
            (num_queries, self.num_heads, self.v_head_dim),
        ]
        return [self.normal(shape, generator) for shape in shapes]

    def normal(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)


class CachedBlocks(NamedTuple):
    """A path as the K/V cache holds it, of one layer: blocks [1, n, K, H] and [1, n, K, W], accumulators alike."""

    k: list[Tensor]
    v: list[Tensor]
    dk: list[Tensor]
    dv: list[Tensor]

    @classmethod
    def random(
        cls, path_len: int, num_blocks: int, shape: LayerShape, generator: torch.Generator | None = None
    ) -> CachedBlocks:
        """Normal keys and values of ``path_len`` tokens in blocks of about equal size; accumulators of zeros."""
        bounds = [path_len * block // num_blocks for block in range(num_blocks + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]

        def blocks(head_dim: int) -> list[Tensor]:
            return [shape.normal((1, size, shape.num_kv_heads, head_dim), generator) for size in sizes]

        k, v = blocks(shape.head_dim), blocks(shape.v_head_dim)
        accumulators = [[torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in part] for part in (k, v)]
        return cls(k, v, *accumulators)

    def in_place(self, layout: AttentionLayout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """[T, N, W] of q [T, N, H] and local k [L, K, H] and v [L, K, W], by Triton kernels that read the blocks and
        add to the accumulators.

        The tables of row addresses are built here: a micro-batch builds them once for all layers.

        Raises:
            UnsupportedError: Triton is not installed.
        """
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError("needs Triton")
        from psrl.runtime.attention.triton import CachedPath, PathGrads

        path, grads = CachedPath.build(self.k, self.v), PathGrads.build(self.dk, self.dv)
        # Bound to the blocks, which have to stay as long as the tables of their addresses.
        return functools.partial(self._in_place, layout, path, grads)

    def gathered(self, layout: AttentionLayout, backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """``in_place`` on a copy of the path, by any backend; the path's gradients are added afterwards."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_SKH, v_SKW = _Gather.apply(k, v, self)
            return attend_layout(q, k_SKH, v_SKW, layout, backend=backend)

        return run

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
