"""Pieces that the kernels share.

Shape legend: M queries of a block, N keys of a block, H head dim. Head dims are read in one or two parts, each a power
of two (192 = 128 + 64), because blocks of a kernel are powers of two.
"""

# Kernels are untyped: Triton gives their names types of its own.
# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Triton's interpreter multiplies the bits of bfloat16 numbers; in float32 their products are the tensor cores'."""


@triton.jit
def load_columns(rows, columns, valid):
    """Elements ``columns`` of the rows that the pointers ``rows`` start; rows that are not valid are 0."""
    return tl.load(rows[:, None] + columns[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to the nearest number of ``dtype``. Triton's interpreter would cut bfloat16 off."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_columns(rows, start, values, valid, WIDTH: tl.constexpr):
    """Store ``values`` [rows, WIDTH], rounded to the pointers' type, from column ``start`` of the valid rows on."""
    pointers = rows[:, None] + (start + tl.arange(0, WIDTH))[None, :]
    tl.store(pointers, round_to(values, rows.dtype.element_ty), mask=valid[:, None])


@triton.jit
def key_rows(
    local, local_stride, local_head_stride, path_rows, path_lens, path_len, layer, head, num_heads, keys,
    HEAD_DIM: tl.constexpr, HAS_PATH: tl.constexpr,
):  # fmt: skip
    """Pointers to the rows of ``keys`` for one key/value head: in the blocks of the cached path, then in ``local``.

    ``path_rows`` has the address of each path key's row in layer 0 of its block ``[layers, n, heads, HEAD_DIM]``,
    ``path_lens`` that block's n.
    """
    if HAS_PATH:
        element: tl.constexpr = local.dtype.element_ty.primitive_bitwidth // 8
        in_path = keys < path_len
        address = tl.load(path_rows + keys, mask=in_path, other=0)
        block_len = tl.load(path_lens + keys, mask=in_path, other=0).to(tl.int64)
        address += (block_len * layer * num_heads + head) * (HEAD_DIM * element)
        offset = (keys - path_len).to(tl.int64) * local_stride + head * local_head_stride
        address = tl.where(in_path, address, local.to(tl.int64) + offset * element)
        # Rows start at multiples of 16 bytes, which lets the loads be wide.
        return tl.multiple_of(address.to(tl.pointer_type(local.dtype.element_ty)), 16)
    return local + keys.to(tl.int64) * local_stride + head * local_head_stride


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """``a @ b`` in float32."""
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_dot(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b`` in float32."""
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)
