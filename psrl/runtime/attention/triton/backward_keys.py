"""Backward kernels of the keys: dK and dV, of the local keys and into the accumulators of the cached path.

No atomics: one program sums all query heads and queries of a key block, and a key of the path has one place in one
accumulator, so what a launch adds to it is one load, one sum and one store.

Shape legend: M queries of a block, N keys of a block, H head dim of q and k (parts H0, H1), W of v (parts W0, W1).
"""

# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from psrl.runtime.attention.triton.backward_queries import LOG2_E
from psrl.runtime.attention.triton.common import add_dot, dot, key_rows, load_columns, round_to, store_columns


@triton.jit
def _store_key_grads(
    grad0, grad1, local, local_stride, local_head_stride, path_grads, path_lens, path_len, layer, head, num_heads,
    keys, valid, D0: tl.constexpr, D1: tl.constexpr, HAS_PATH: tl.constexpr,
):  # fmt: skip
    """Store the gradients of local keys; add those of path keys to their block's float32 accumulator."""
    is_local = valid
    if HAS_PATH:
        in_path = keys < path_len
        is_local = valid & (keys >= path_len)
        address = tl.load(path_grads + keys, mask=in_path, other=0)
        block_len = tl.load(path_lens + keys, mask=in_path, other=0).to(tl.int64)
        address += (block_len * layer * num_heads + head) * ((D0 + D1) * 4)
        totals = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        store_columns(totals, 0, load_columns(totals, tl.arange(0, D0), in_path) + grad0, in_path, D0)
        if D1 > 0:
            before = load_columns(totals, D0 + tl.arange(0, D1), in_path)
            store_columns(totals, D0, before + grad1, in_path, D1)
    rows = local + (keys - path_len).to(tl.int64) * local_stride + head * local_head_stride
    store_columns(rows, 0, grad0, is_local, D0)
    if D1 > 0:
        store_columns(rows, D0, grad1, is_local, D1)


@triton.jit(
    do_not_specialize=["num_queries", "num_keys", "path_len", "layer"],
    do_not_specialize_on_alignment=[
        "first", "last", "items", "tiles", "path_k", "path_v", "path_dk", "path_dv", "path_lens", "lse", "delta",
        "part_dk", "part_dv",
    ],
)  # fmt: skip
def dkv_kernel(
    q, k, v, grad_out, dk, dv, lse, delta, part_dk, part_dv, first, last, items, tiles,
    path_k, path_v, path_dk, path_dv, path_lens,
    num_queries, num_keys, path_len, layer, scale, grad_scale, num_kv_heads,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, grad_stride, grad_head_stride,
    dk_stride, dk_head_stride, dv_stride, dv_head_stride,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    HAS_PATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program an item (and key/value head), the longest first: some tiles of one key block. Not persistent, since
    what the stores need would stay in registers from one item to the next, and spill."""
    task = tl.program_id(0)
    item, head = items + task // num_kv_heads * 5, (task % num_kv_heads).to(tl.int64)
    slot = tl.load(item + 4)
    rows = tl.arange(0, N)
    keys = tl.load(item) * N + rows
    valid = keys < num_keys
    k_rows = key_rows(k, k_stride, k_head_stride, path_k, path_lens, path_len, layer, head, num_kv_heads,
                      keys, H0 + H1, HAS_PATH)  # fmt: skip
    v_rows = key_rows(v, v_stride, v_head_stride, path_v, path_lens, path_len, layer, head, num_kv_heads,
                      keys, W0 + W1, HAS_PATH)  # fmt: skip
    k0 = load_columns(k_rows, tl.arange(0, H0), valid)
    k1 = load_columns(k_rows, H0 + tl.arange(0, H1), valid) if H1 > 0 else 0.0
    v0 = load_columns(v_rows, tl.arange(0, W0), valid)
    v1 = load_columns(v_rows, W0 + tl.arange(0, W1), valid) if W1 > 0 else 0.0
    begins = tl.load(first + keys, mask=valid, other=0)
    ends = tl.load(last + keys, mask=valid, other=0)
    dk0, dv0 = tl.zeros([N, H0], tl.float32), tl.zeros([N, W0], tl.float32)
    dk1 = tl.zeros([N, H1], tl.float32) if H1 > 0 else 0.0
    dv1 = tl.zeros([N, W1], tl.float32) if W1 > 0 else 0.0
    begin, full, end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    # One loop over the tiles of every query head of the group; scores are transposed, [N, M]. Queries beyond the
    # last are read as 0 and so is their gradient: they add nothing.
    for j in range(0, (end - begin) * GROUP):
        i, q_head = begin + j % (end - begin), head * GROUP + j // (end - begin)
        queries = tl.load(tiles + i) * M + tl.arange(0, M)
        in_range = queries < num_queries
        q_rows = q + queries.to(tl.int64) * q_stride + q_head * q_head_stride
        grad_rows = grad_out + queries.to(tl.int64) * grad_stride + q_head * grad_head_stride
        q0 = load_columns(q_rows, tl.arange(0, H0), in_range)
        do0 = load_columns(grad_rows, tl.arange(0, W0), in_range)
        lse_log2 = tl.load(lse + q_head * num_queries + queries, mask=in_range, other=0.0) * LOG2_E
        row_delta = tl.load(delta + q_head * num_queries + queries, mask=in_range, other=0.0)
        scores = dot(k0, tl.trans(q0), PRECISION)
        if H1 > 0:
            q1 = load_columns(q_rows, H0 + tl.arange(0, H1), in_range)
            scores = add_dot(k1, tl.trans(q1), scores, PRECISION)
        weights = tl.exp2(scores * (scale * LOG2_E) - lse_log2[None, :])
        if i < full:
            is_visible = (queries[None, :] >= begins[:, None]) & (queries[None, :] < ends[:, None])
            weights = tl.where(is_visible, weights, 0.0)
        rounded = round_to(weights, do0.dtype)
        dv0 = add_dot(rounded, do0, dv0, PRECISION)
        grad_weights = dot(v0, tl.trans(do0), PRECISION)
        if W1 > 0:
            do1 = load_columns(grad_rows, W0 + tl.arange(0, W1), in_range)
            dv1 = add_dot(rounded, do1, dv1, PRECISION)
            grad_weights = add_dot(v1, tl.trans(do1), grad_weights, PRECISION)
        grad_scores = round_to(weights * (grad_weights - row_delta[None, :]), q0.dtype)
        dk0 = add_dot(grad_scores, q0, dk0, PRECISION)
        if H1 > 0:
            dk1 = add_dot(grad_scores, q1, dk1, PRECISION)
    dk0 *= grad_scale
    dk1 *= grad_scale
    if slot < 0:
        _store_key_grads(dk0, dk1, dk, dk_stride, dk_head_stride, path_dk, path_lens, path_len, layer, head,
                         num_kv_heads, keys, valid, H0, H1, HAS_PATH)  # fmt: skip
        _store_key_grads(dv0, dv1, dv, dv_stride, dv_head_stride, path_dv, path_lens, path_len, layer, head,
                         num_kv_heads, keys, valid, W0, W1, HAS_PATH)  # fmt: skip
    else:
        part = (slot * num_kv_heads + head) * N + rows
        store_columns(part_dk + part * (H0 + H1), 0, dk0, valid, H0)
        store_columns(part_dv + part * (W0 + W1), 0, dv0, valid, W0)
        if H1 > 0:
            store_columns(part_dk + part * (H0 + H1), H0, dk1, valid, H1)
        if W1 > 0:
            store_columns(part_dv + part * (W0 + W1), W0, dv1, valid, W1)


@triton.jit(
    do_not_specialize=["num_keys", "path_len", "layer"],
    do_not_specialize_on_alignment=["part", "splits", "path_grads", "path_lens"],
)
def add_key_grads_kernel(
    grads, part, splits, path_grads, path_lens, num_keys, path_len, layer, num_kv_heads, stride, head_stride,
    N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, HAS_PATH: tl.constexpr,
):  # fmt: skip
    """Add the partial dK (or dV) of one split key block and head, in the order of their slots, and store the sum."""
    split, head = splits + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, N)
    keys = tl.load(split) * N + rows
    valid = keys < num_keys
    grad0 = tl.zeros([N, D0], tl.float32)
    grad1 = tl.zeros([N, D1], tl.float32) if D1 > 0 else 0.0
    for slot in range(tl.load(split + 1), tl.load(split + 2)):
        part_rows = part + ((slot * num_kv_heads + head) * N + rows) * (D0 + D1)
        grad0 += load_columns(part_rows, tl.arange(0, D0), valid)
        if D1 > 0:
            grad1 += load_columns(part_rows, D0 + tl.arange(0, D1), valid)
    _store_key_grads(grad0, grad1, grads, stride, head_stride, path_grads, path_lens, path_len, layer, head,
                     num_kv_heads, keys, valid, D0, D1, HAS_PATH)  # fmt: skip
