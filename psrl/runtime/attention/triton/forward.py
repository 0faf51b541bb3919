"""Forward kernels: outputs and log-sum-exp; the merge of split rows.

Shape legend: M queries of a block, N keys of a block, H head dim of q and k (parts H0, H1), W of v (parts W0, W1).
"""

# pyright: basic, reportInvalidTypeForm=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from psrl.runtime.attention.triton.common import add_dot, dot, key_rows, load_columns, round_to, store_columns

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["num_items", "num_queries", "num_keys", "path_len", "layer"],
    do_not_specialize_on_alignment=[
        "first", "last", "items", "tiles", "path_k", "path_v", "path_lens", "lse", "part_out", "part_lse",
    ],
)  # fmt: skip
def forward_kernel(
    q, k, v, out, lse, part_out, part_lse, first, last, items, tiles, path_k, path_v, path_lens,
    num_items, num_queries, num_keys, path_len, layer, scale_log2, num_heads,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    HAS_PATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs walk the items (x heads) with a stride of the grid; an item is some tiles of one query block."""
    for task in range(tl.program_id(0), num_items * num_heads, tl.num_programs(0)):
        item, head = items + task // num_heads * 5, (task % num_heads).to(tl.int64)
        slot = tl.load(item + 4)
        rows = tl.arange(0, M)
        queries = tl.load(item) * M + rows
        valid = queries < num_queries
        q_rows = q + queries.to(tl.int64) * q_stride + head * q_head_stride
        q0 = load_columns(q_rows, tl.arange(0, H0), valid)
        q1 = load_columns(q_rows, H0 + tl.arange(0, H1), valid) if H1 > 0 else 0.0
        out0 = tl.zeros([M, W0], tl.float32)
        out1 = tl.zeros([M, W1], tl.float32) if W1 > 0 else 0.0
        highest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        begin, full, end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        for i in range(begin, end):
            keys = tl.load(tiles + i) * N + tl.arange(0, N)
            in_range = keys < num_keys
            k_rows = key_rows(k, k_stride, k_head_stride, path_k, path_lens, path_len, layer, head // GROUP,
                              num_heads // GROUP, keys, H0 + H1, HAS_PATH)  # fmt: skip
            k0 = load_columns(k_rows, tl.arange(0, H0), in_range)
            scores = dot(q0, tl.trans(k0), PRECISION)
            if H1 > 0:
                k1 = load_columns(k_rows, H0 + tl.arange(0, H1), in_range)
                scores = add_dot(q1, tl.trans(k1), scores, PRECISION)
            scores *= scale_log2
            if i < full:
                begins = tl.load(first + keys, mask=in_range, other=0)
                ends = tl.load(last + keys, mask=in_range, other=0)
                is_visible = (queries[:, None] >= begins[None, :]) & (queries[:, None] < ends[None, :])
                scores = tl.where(is_visible, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # A row that has seen no key yet: any finite value keeps exp2(-inf - x) at 0.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - shift[:, None])
            shrink = tl.exp2(highest - shift)
            total = total * shrink + tl.sum(weights, 1)
            highest = new_highest
            v_rows = key_rows(v, v_stride, v_head_stride, path_v, path_lens, path_len, layer, head // GROUP,
                              num_heads // GROUP, keys, W0 + W1, HAS_PATH)  # fmt: skip
            v0 = load_columns(v_rows, tl.arange(0, W0), in_range)
            weights = round_to(weights, v0.dtype)
            out0 = add_dot(weights, v0, out0 * shrink[:, None], PRECISION)
            if W1 > 0:
                v1 = load_columns(v_rows, W0 + tl.arange(0, W1), in_range)
                out1 = add_dot(weights, v1, out1 * shrink[:, None], PRECISION)
        inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
        row_lse = tl.where(total > 0.0, (highest + tl.log2(total)) * LN_2, float("-inf"))
        if slot < 0:
            out_rows = out + queries.to(tl.int64) * out_stride + head * out_head_stride
            store_columns(out_rows, 0, out0 * inverse[:, None], valid, W0)
            if W1 > 0:
                store_columns(out_rows, W0, out1 * inverse[:, None], valid, W1)
            tl.store(lse + head * num_queries + queries, row_lse, mask=valid)
        else:
            part = (slot * num_heads + head) * M + rows
            store_columns(part_out + part * (W0 + W1), 0, out0 * inverse[:, None], valid, W0)
            if W1 > 0:
                store_columns(part_out + part * (W0 + W1), W0, out1 * inverse[:, None], valid, W1)
            tl.store(part_lse + part, row_lse, mask=valid)


@triton.jit(
    do_not_specialize=["num_queries"],
    do_not_specialize_on_alignment=["lse", "part_out", "part_lse", "splits"],
)
def merge_kernel(
    out, lse, part_out, part_lse, splits, num_queries, num_heads, out_stride, out_head_stride,
    M: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one split query block and head by log-sum-exp, in the order of their slots."""
    split, head = splits + tl.program_id(0) * 3, tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, M)
    queries = tl.load(split) * M + rows
    valid = queries < num_queries
    begin, end = tl.load(split + 1), tl.load(split + 2)
    highest = tl.full([M], float("-inf"), tl.float32)
    for slot in range(begin, end):
        part = (slot * num_heads + head) * M + rows
        highest = tl.maximum(highest, tl.load(part_lse + part, mask=valid, other=float("-inf")))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([M], tl.float32)
    out0 = tl.zeros([M, W0], tl.float32)
    out1 = tl.zeros([M, W1], tl.float32) if W1 > 0 else 0.0
    for slot in range(begin, end):
        part = (slot * num_heads + head) * M + rows
        share = tl.exp(tl.load(part_lse + part, mask=valid, other=float("-inf")) - shift)
        total += share
        part_rows = part_out + part * (W0 + W1)
        out0 += share[:, None] * load_columns(part_rows, tl.arange(0, W0), valid)
        if W1 > 0:
            out1 += share[:, None] * load_columns(part_rows, W0 + tl.arange(0, W1), valid)
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    out_rows = out + queries.to(tl.int64) * out_stride + head * out_head_stride
    store_columns(out_rows, 0, out0 * inverse[:, None], valid, W0)
    if W1 > 0:
        store_columns(out_rows, W0, out1 * inverse[:, None], valid, W1)
    row_lse = tl.where(total > 0.0, shift + tl.log(total), float("-inf"))
    tl.store(lse + head * num_queries + queries, row_lse, mask=valid)
