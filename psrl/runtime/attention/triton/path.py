"""The cached path as a table of row addresses, so that kernels read blocks where they lie.

Shape legend: L layers, n tokens of a block, P path tokens, K key/value heads, D head dim (of k or of v).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.runtime.transfer import to_device

ALIGNMENT = 16
"""Bytes. Kernels read rows in units of it."""


class RowTable(NamedTuple):
    """Where the rows of one tensor per block lie: [L, n, K, D] each, in path order."""

    rows_P: Tensor
    """[P] int64, on the device: address of each path token's row in layer 0 of its block."""
    lens_P: Tensor
    """[P] int32, on the device: n of the token's block, the distance between layers in rows."""
    num_heads: int
    head_dim: int
    dtype: torch.dtype


class CachedPath(NamedTuple):
    """K and V of a micro-batch's path, for every layer. Holds addresses, no storage: whoever owns the blocks keeps
    them from the build of the table to the last launch that reads it."""

    k: RowTable
    v: RowTable

    @property
    def num_tokens(self) -> int:
        return len(self.k.rows_P)

    @classmethod
    def build(
        cls, k_blocks: Sequence[Tensor], v_blocks: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> CachedPath:
        """Args: the path's blocks from the root on, each [L, n, K, H] and [L, n, K, W]; see ``row_table``."""
        return cls(row_table(k_blocks, sizes), row_table(v_blocks, sizes))


def row_table(blocks: Sequence[Tensor], sizes: Sequence[int] | None = None) -> RowTable:
    """Table of at least one block. Copies two small arrays to the device, without synchronising.

    Args:
        blocks: [L, n, K, D] each.
        sizes: rows of each block that are path tokens, its first ones; None: all n.

    Raises:
        ValueError: no block, blocks that differ in layers, heads, head dim, dtype or device, or are strided, or sizes
            that do not fit them.
        UnsupportedError: rows that do not start at multiples of 16 bytes.
    """
    if not blocks:
        raise ValueError("a path has at least one block")
    like = blocks[0]
    for x in blocks:
        if x.dim() != 4 or (x.shape[0], x.shape[2:], x.dtype, x.device) != (
            like.shape[0], like.shape[2:], like.dtype, like.device,
        ):  # fmt: skip
            raise ValueError(
                "the blocks of a path must be [layers, tokens, heads, head dim] of one kind, got "
                f"{tuple(like.shape)} {like.dtype} on {like.device} and {tuple(x.shape)} {x.dtype} on {x.device}"
            )
        if not x.is_contiguous():
            raise ValueError(f"the blocks of a path must be contiguous, got strides {x.stride()}")
    num_heads, head_dim = like.shape[2:]
    if head_dim * like.element_size() % ALIGNMENT or any(x.data_ptr() % ALIGNMENT for x in blocks):
        raise UnsupportedError(
            f"cached blocks need rows at multiples of {ALIGNMENT} bytes, got head dim {head_dim} of {like.dtype}"
        )
    lens = np.array([x.shape[1] for x in blocks])
    used = lens if sizes is None else np.array(sizes)
    if used.shape != lens.shape or (used > lens).any() or (used < 0).any():
        raise ValueError(f"a path has {used.tolist()} tokens in blocks of {lens.tolist()}")
    row_bytes = num_heads * head_dim * like.element_size()
    row_in_block = np.arange(used.sum()) - np.repeat(np.cumsum(used) - used, used)
    rows = np.repeat(np.array([x.data_ptr() for x in blocks]), used) + row_in_block * row_bytes
    return RowTable(
        to_device(rows.astype(np.int64), like.device),
        to_device(np.repeat(lens, used).astype(np.int32), like.device),
        num_heads,
        head_dim,
        like.dtype,
    )
