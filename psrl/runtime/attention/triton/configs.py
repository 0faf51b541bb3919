"""Block sizes of the kernels, by device, head dim and dtype: no length decides them or is part of a compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from psrl.errors import UnsupportedError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
PRECISIONS = ("tf32", "ieee")


class BlockSizes(NamedTuple):
    """Tile of one kernel and how the compiler is to run it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    """Key (or query) tiles in flight from memory."""


class KernelConfig(NamedTuple):
    forward: BlockSizes
    dq: BlockSizes
    dkv: BlockSizes
    precision: str
    """``input_precision`` of the products: ``ieee`` where inputs are float32, which tensor cores do not multiply."""


# By architecture, then by the larger of the two head dims, rounded up to a key of the table. These are the largest
# tiles that the compiler gives no register spills for (docs/kernels.md). ``tuning`` measures others.
_HALF = {
    8: {
        64: KernelConfig(
            BlockSizes(128, 64, 8, 3), BlockSizes(128, 64, 8, 2), BlockSizes(32, 128, 8, 2), "tf32"),
        128: KernelConfig(
            BlockSizes(128, 32, 8, 3), BlockSizes(128, 32, 8, 2), BlockSizes(64, 64, 8, 2), "tf32"),
        192: KernelConfig(
            BlockSizes(128, 32, 8, 2), BlockSizes(32, 32, 8, 2), BlockSizes(32, 32, 8, 2), "tf32"),
        256: KernelConfig(
            BlockSizes(64, 32, 8, 2), BlockSizes(64, 32, 8, 2), BlockSizes(32, 32, 8, 2), "tf32"),
    },
    9: {
        64: KernelConfig(
            BlockSizes(128, 64, 8, 3), BlockSizes(128, 64, 8, 2), BlockSizes(64, 128, 8, 2), "tf32"),
        128: KernelConfig(
            BlockSizes(128, 64, 8, 3), BlockSizes(128, 64, 8, 2), BlockSizes(64, 64, 8, 2), "tf32"),
        192: KernelConfig(
            BlockSizes(128, 64, 8, 2), BlockSizes(128, 32, 8, 2), BlockSizes(32, 64, 8, 2), "tf32"),
        256: KernelConfig(
            BlockSizes(128, 32, 8, 2), BlockSizes(64, 16, 8, 2), BlockSizes(32, 32, 8, 2), "tf32"),
    },
    10: {
        64: KernelConfig(
            BlockSizes(128, 64, 8, 3), BlockSizes(128, 64, 8, 2), BlockSizes(64, 128, 8, 2), "tf32"),
        128: KernelConfig(
            BlockSizes(128, 32, 8, 2), BlockSizes(128, 32, 8, 2), BlockSizes(64, 64, 8, 2), "tf32"),
        192: KernelConfig(
            BlockSizes(64, 32, 8, 2), BlockSizes(32, 32, 8, 2), BlockSizes(32, 32, 8, 2), "tf32"),
        256: KernelConfig(
            BlockSizes(64, 16, 8, 2), BlockSizes(32, 32, 8, 2), BlockSizes(32, 32, 8, 2), "tf32"),
    },
}  # fmt: skip
# float32 is for tests and small models: one table for every architecture.
_SINGLE = {
    64: KernelConfig(
        BlockSizes(64, 32, 8, 1), BlockSizes(64, 32, 8, 1), BlockSizes(32, 64, 8, 1), "ieee"),
    128: KernelConfig(
        BlockSizes(32, 32, 8, 1), BlockSizes(32, 32, 8, 1), BlockSizes(32, 32, 8, 1), "ieee"),
    256: KernelConfig(
        BlockSizes(32, 16, 8, 1), BlockSizes(32, 16, 8, 1), BlockSizes(16, 32, 8, 1), "ieee"),
}  # fmt: skip


_chosen: dict[tuple[int, int, torch.dtype], KernelConfig] = {}


def kernel_config(head_dim: int, v_head_dim: int, dtype: torch.dtype, major: int) -> KernelConfig:
    """The tiles of a call: what ``use_tiles`` set, or the default.

    Args:
        major: the device's compute capability: 8 for Ampere and Ada, 9 for Hopper, 10 and more for Blackwell.

    Raises:
        UnsupportedError: the dtype or a head dim has none.
    """
    if dtype not in DTYPES:
        names = " or ".join(str(x).removeprefix("torch.") for x in DTYPES)
        raise UnsupportedError(
            f"attention backend 'triton' takes {names}, got {str(dtype).removeprefix('torch.')}: "
            "change the model's dtype, or set psrl.attention_backend to sdpa or reference"
        )
    for dim in (head_dim, v_head_dim):
        split_head_dim(dim)
    chosen = _chosen.get((head_dim, v_head_dim, dtype))
    if chosen is not None:
        return chosen
    table = _SINGLE if dtype == torch.float32 else _HALF[min(max(major, 8), 10)]
    return table[min(size for size in table if size >= max(head_dim, v_head_dim))]


def use_tiles(head_dim: int, v_head_dim: int, dtype: torch.dtype, tiles: KernelConfig | None) -> None:
    """From now on calls of these head dims and dtype run these tiles, in the whole process. None: the default."""
    if tiles is None:
        _chosen.pop((head_dim, v_head_dim, dtype), None)
    else:
        _chosen[head_dim, v_head_dim, dtype] = tiles


def split_head_dim(dim: int) -> tuple[int, int]:
    """One power of two, or a larger and a smaller one: 128 is (128, 0), 192 is (128, 64).

    Raises:
        UnsupportedError: ``dim`` is no such sum, or out of range.
    """
    large = 1 << (dim.bit_length() - 1) if dim > 0 else 0
    small = dim - large
    if not 16 <= large <= MAX_HEAD_DIM or dim > MAX_HEAD_DIM or small & (small - 1) or 0 < small < 16:
        raise UnsupportedError(
            "attention backend 'triton' takes head dims up to 256 that are a power of two from 16 on or the sum of two "
            f"(64, 96, 128, 192, 256, ...), got {dim}: set psrl.attention_backend to sdpa or flash"
        )
    return large, small
