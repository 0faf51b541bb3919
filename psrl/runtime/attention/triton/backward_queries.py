"""Backward kernels of the queries: the softmax's row term, and dQ. No atomics: one program sums a query block.

Shape legend: M queries of a block, N keys of a block, H head dim of q and k (parts H0, H1), W of v (parts W0, W1).
"""

# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from psrl.runtime.attention.triton.common import add_dot, dot, key_rows, load_columns, round_to, store_columns

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["delta"])
def delta_kernel(
    out, grad_out, delta, num_queries, out_stride, out_head_stride, grad_stride, grad_head_stride,
    M: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    """Dot product of each output row with its gradient, in float32: [heads, queries]."""
    queries, head = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1).to(tl.int64)
    valid = queries < num_queries
    out_rows = out + queries.to(tl.int64) * out_stride + head * out_head_stride
    grad_rows = grad_out + queries.to(tl.int64) * grad_stride + head * grad_head_stride
    part = load_columns(out_rows, tl.arange(0, W0), valid).to(tl.float32)
    total = tl.sum(part * load_columns(grad_rows, tl.arange(0, W0), valid).to(tl.float32), 1)
    if W1 > 0:
        part = load_columns(out_rows, W0 + tl.arange(0, W1), valid).to(tl.float32)
        total += tl.sum(part * load_columns(grad_rows, W0 + tl.arange(0, W1), valid).to(tl.float32), 1)
    tl.store(delta + head * num_queries + queries, total, mask=valid)


@triton.jit(
    do_not_specialize=["num_items", "num_queries", "num_keys", "path_len", "layer"],
    do_not_specialize_on_alignment=[
        "first", "last", "items", "tiles", "path_k", "path_v", "path_lens", "lse", "delta", "part_dq",
    ],
)  # fmt: skip
def dq_kernel(
    q, k, v, grad_out, dq, lse, delta, part_dq, first, last, items, tiles, path_k, path_v, path_lens,
    num_items, num_queries, num_keys, path_len, layer, scale, grad_scale, num_heads,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, grad_stride, grad_head_stride,
    dq_stride, dq_head_stride,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    HAS_PATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``: an item is some tiles of one query block, whose dQ the program sums."""
    for task in range(tl.program_id(0), num_items * num_heads, tl.num_programs(0)):
        item, head = items + task // num_heads * 5, (task % num_heads).to(tl.int64)
        slot = tl.load(item + 4)
        rows = tl.arange(0, M)
        queries = tl.load(item) * M + rows
        valid = queries < num_queries
        q_rows = q + queries.to(tl.int64) * q_stride + head * q_head_stride
        grad_rows = grad_out + queries.to(tl.int64) * grad_stride + head * grad_head_stride
        q0 = load_columns(q_rows, tl.arange(0, H0), valid)
        q1 = load_columns(q_rows, H0 + tl.arange(0, H1), valid) if H1 > 0 else 0.0
        do0 = load_columns(grad_rows, tl.arange(0, W0), valid)
        do1 = load_columns(grad_rows, W0 + tl.arange(0, W1), valid) if W1 > 0 else 0.0
        row = head * num_queries + queries
        lse_log2 = tl.load(lse + row, mask=valid, other=0.0) * LOG2_E
        row_delta = tl.load(delta + row, mask=valid, other=0.0)
        dq0 = tl.zeros([M, H0], tl.float32)
        dq1 = tl.zeros([M, H1], tl.float32) if H1 > 0 else 0.0
        begin, full, end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        for i in range(begin, end):
            keys = tl.load(tiles + i) * N + tl.arange(0, N)
            in_range = keys < num_keys
            k_rows = key_rows(k, k_stride, k_head_stride, path_k, path_lens, path_len, layer, head // GROUP,
                              num_heads // GROUP, keys, H0 + H1, HAS_PATH)  # fmt: skip
            v_rows = key_rows(v, v_stride, v_head_stride, path_v, path_lens, path_len, layer, head // GROUP,
                              num_heads // GROUP, keys, W0 + W1, HAS_PATH)  # fmt: skip
            k0 = load_columns(k_rows, tl.arange(0, H0), in_range)
            v0 = load_columns(v_rows, tl.arange(0, W0), in_range)
            scores = dot(q0, tl.trans(k0), PRECISION)
            grad_weights = dot(do0, tl.trans(v0), PRECISION)
            if H1 > 0:
                k1 = load_columns(k_rows, H0 + tl.arange(0, H1), in_range)
                scores = add_dot(q1, tl.trans(k1), scores, PRECISION)
            if W1 > 0:
                v1 = load_columns(v_rows, W0 + tl.arange(0, W1), in_range)
                grad_weights = add_dot(do1, tl.trans(v1), grad_weights, PRECISION)
            weights = tl.exp2(scores * (scale * LOG2_E) - lse_log2[:, None])
            if i < full:
                begins = tl.load(first + keys, mask=in_range, other=0)
                ends = tl.load(last + keys, mask=in_range, other=0)
                is_visible = (queries[:, None] >= begins[None, :]) & (queries[:, None] < ends[None, :])
                weights = tl.where(is_visible, weights, 0.0)
            grad_scores = round_to(weights * (grad_weights - row_delta[:, None]), k0.dtype)
            dq0 = add_dot(grad_scores, k0, dq0, PRECISION)
            if H1 > 0:
                dq1 = add_dot(grad_scores, k1, dq1, PRECISION)
        if slot < 0:
            dq_rows = dq + queries.to(tl.int64) * dq_stride + head * dq_head_stride
            store_columns(dq_rows, 0, dq0 * grad_scale, valid, H0)
            if H1 > 0:
                store_columns(dq_rows, H0, dq1 * grad_scale, valid, H1)
        else:
            part_rows = part_dq + ((slot * num_heads + head) * M + rows) * (H0 + H1)
            store_columns(part_rows, 0, dq0 * grad_scale, valid, H0)
            if H1 > 0:
                store_columns(part_rows, H0, dq1 * grad_scale, valid, H1)


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["part_dq", "splits"])
def add_dq_kernel(
    dq, part_dq, splits, num_queries, num_heads, dq_stride, dq_head_stride,
    M: tl.constexpr, H0: tl.constexpr, H1: tl.constexpr,
):  # fmt: skip
    """Add the partial dQ of one split query block and head, in the order of their slots."""
    split, head = splits + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, M)
    queries = tl.load(split) * M + rows
    valid = queries < num_queries
    dq0 = tl.zeros([M, H0], tl.float32)
    dq1 = tl.zeros([M, H1], tl.float32) if H1 > 0 else 0.0
    for slot in range(tl.load(split + 1), tl.load(split + 2)):
        part_rows = part_dq + ((slot * num_heads + head) * M + rows) * (H0 + H1)
        dq0 += load_columns(part_rows, tl.arange(0, H0), valid)
        if H1 > 0:
            dq1 += load_columns(part_rows, H0 + tl.arange(0, H1), valid)
    dq_rows = dq + queries.to(tl.int64) * dq_stride + head * dq_head_stride
    store_columns(dq_rows, 0, dq0, valid, H0)
    if H1 > 0:
        store_columns(dq_rows, H0, dq1, valid, H1)
