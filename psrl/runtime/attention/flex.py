"""The ``flex`` backend: PyTorch's FlexAttention with a block mask built straight from the intervals.

No dense mask is made: the lists of full and partial blocks come from ``block_tiles``, and inside partial blocks the
compiled kernel compares two integers per key. Compiled once for all lengths.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dim of q and k, W of v.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from psrl.errors import UnsupportedError
from psrl.runtime.attention.block_tiles import TileList, build_block_tiles
from psrl.runtime.attention.flash_kernels import is_installed
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.transfer import to_device

log = logging.getLogger(__name__)

BLOCK = 128


def flex_attention_backend(
    q_TNH: Tensor, k_SKH: Tensor, v_SKW: Tensor, layout: AttentionLayout, scale: float
) -> Tensor:
    """[T, N, W], differentiable on CUDA. On CPU FlexAttention has a forward pass only.

    On FlashAttention-4 the backward pass sums dQ in no fixed order; ``torch.use_deterministic_algorithms(True)``
    takes PyTorch's Triton kernels instead.

    Raises:
        UnsupportedError: gradients are wanted on CPU, or the dtype has no kernel.
    """
    if q_TNH.dtype == torch.float64:
        raise UnsupportedError(
            "attention backend 'flex' takes bfloat16, float16 or float32, got float64: set psrl.attention_backend=sdpa"
        )
    if q_TNH.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q_TNH, k_SKH, v_SKW)):
        raise UnsupportedError(
            "attention backend 'flex' has no backward on cpu: set psrl.attention_backend=sdpa, or run without gradients"
        )
    if layout.visible_pairs == 0:
        # Zeros that still carry (zero) gradients.
        nothing = sum(x[..., :0].sum() for x in (q_TNH, k_SKH, v_SKW))
        return q_TNH.new_zeros((*q_TNH.shape[:2], v_SKW.shape[2])) + nothing
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TNH, k_SKH, v_SKW))
    if not torch.is_grad_enabled():
        q, k, v = (x.detach() for x in (q, k, v))
    options: dict[str, Any] = {"BACKEND": "FLASH"} if _runs_flash4(q.device) else {}
    out = _compiled()(
        q, k, v, block_mask=device_block_mask(layout, q.device), scale=scale, enable_gqa=True, kernel_options=options
    )
    return out.squeeze(0).transpose(0, 1)


def device_block_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    """The layout's block mask on ``device``, made once."""
    key = ("flex_block_mask", device)
    if key not in layout.derived:
        layout.derived[key] = block_mask(layout, device, 2 * BLOCK if _runs_flash4(device) else BLOCK, BLOCK)
    return layout.derived[key]


def block_mask(layout: AttentionLayout, device: torch.device, query_block: int, key_block: int) -> BlockMask:
    """Block mask of the layout, in time and memory proportional to blocks."""
    tiles = build_block_tiles(layout.first_S, layout.last_S, layout.num_queries, query_block, key_block)
    partial, full = _block_table(tiles.by_query, tiles.by_key.num_rows)
    first_S, last_S = (to_device(x.astype(np.int32), device) for x in (layout.first_S, layout.last_S))
    mask = BlockMask.from_kv_blocks(
        *(to_device(x, device)[None, None] for x in partial),
        *(to_device(x, device)[None, None] for x in full),
        BLOCK_SIZE=(query_block, key_block),
        mask_mod=_visible(first_S, last_S),
        seq_lengths=(layout.num_queries, layout.num_keys),
    )
    # Sizes of an object's tensors are constants to the compiler until they change: say beforehand that they will.
    tables = [x for x in mask.as_tuple(flatten=True) if isinstance(x, Tensor)]
    for x in (*tables, first_S, last_S):
        for dim in range(2 if x.dim() > 2 else 0, x.dim()):
            torch._dynamo.maybe_mark_dynamic(x, dim)
    return mask


def _visible(first_S: Tensor, last_S: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_S[key] <= query) & (query < last_S[key])

    return is_visible


def _block_table(tiles: TileList, num_columns: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """For partial and for full blocks: their number per row, [B], and their columns from the left, [B, columns]."""
    entries = np.arange(tiles.num_tiles)
    rows = np.repeat(np.arange(tiles.num_rows), np.diff(tiles.begin_B))
    is_full = entries >= tiles.full_B[rows]
    tables = []
    for chosen, begin in ((~is_full, tiles.begin_B[:-1]), (is_full, tiles.full_B)):
        table = np.zeros((tiles.num_rows, num_columns), np.int32)
        table[rows[chosen], entries[chosen] - begin[rows[chosen]]] = tiles.columns_E[chosen]
        tables.append((np.bincount(rows[chosen], minlength=tiles.num_rows).astype(np.int32), table))
    return tuple(tables)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _runs_flash4(device: torch.device) -> bool:
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return _has_flash4(torch.cuda.get_device_capability(device)[0])


@functools.cache
def _has_flash4(major: int) -> bool:
    found = major >= 9 and is_installed("flash_attn.cute.interface")
    log.info("attention backend 'flex' runs %s", "FlashAttention-4" if found else "PyTorch's Triton kernels")
    return found
