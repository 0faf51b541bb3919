"""From tensors and a layout to kernel launches: what is launched, over how many programs, with which arguments.

Building a launch starts nothing, so that the same calls can be compiled for a device that is not there.

Shape legend: T queries, S keys, L local keys, P path keys, N query heads, K key/value heads, H head dim of q and k,
W of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from psrl.errors import UnsupportedError
from psrl.runtime.attention.block_tiles import BlockTiles, TileList, build_block_tiles, plan_work
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.triton import backward_keys, backward_queries, forward
from psrl.runtime.attention.triton.configs import BlockSizes, KernelConfig, split_head_dim
from psrl.runtime.attention.triton.path import CachedPath, RowTable
from psrl.runtime.transfer import to_device

MIN_TILES = 4
"""Tiles below which a row is not cut: merging its parts would cost more than running them one after the other."""
PROGRAMS_PER_PROCESSOR = 2
CPU_PROGRAMS = 4
"""Programs of a launch in Triton's interpreter."""


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """
        Raises:
            UnsupportedError: the device has no room for the kernel's tiles, or its assembler gives up on them.
        """
        try:
            self.kernel[self.grid](**self.args, **self.options)
        except (OutOfResources, PTXASError) as error:
            raise UnsupportedError(
                f"attention backend 'triton': {self.kernel.__name__} does not fit this device ({error}): set "
                "psrl.attention_backend to flash or sdpa"
            ) from error


class Work(NamedTuple):
    """A ``WorkList`` and its ``TileList`` on the device."""

    items: Tensor
    splits: Tensor
    tiles: Tensor
    num_slots: int
    num_programs: int


@dataclass(frozen=True)
class Keys:
    """What the queries see: an optional cached path, then local tokens."""

    k_LKH: Tensor
    v_LKW: Tensor
    path: CachedPath | None = None
    layer: int = 0

    @property
    def num_heads(self) -> int:
        return self.k_LKH.shape[1]

    @property
    def path_len(self) -> int:
        return self.path.num_tokens if self.path else 0

    def args(self) -> dict[str, Any]:
        path, k, v = self.path, self.k_LKH, self.v_LKW
        return {
            "k": k, "v": v, "path_k": path.k.rows_P if path else None, "path_v": path.v.rows_P if path else None,
            "path_lens": path.k.lens_P if path else None, "path_len": self.path_len, "layer": self.layer,
            "HAS_PATH": path is not None, **_strides(k=k, v=v),
        }  # fmt: skip


def num_programs(device: torch.device) -> int:
    """Programs of a persistent launch."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_PROCESSOR
    return CPU_PROGRAMS


def prepare(
    layout: AttentionLayout, config: KernelConfig, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    """Put the tables of the three kernels on ``device``; attention does it at its first layer otherwise."""
    _work(layout, config.forward, True, num_heads, device)
    _work(layout, config.dq, True, num_heads, device)
    _work(layout, config.dkv, False, num_kv_heads, device)
    _intervals(layout, device)


def block_tiles(layout: AttentionLayout, blocks: BlockSizes) -> BlockTiles:
    """The tiles that a kernel with these blocks visits."""
    key = ("block_tiles", blocks.queries, blocks.keys)
    if key not in layout.derived:
        layout.derived[key] = build_block_tiles(
            layout.first_S, layout.last_S, layout.num_queries, blocks.queries, blocks.keys
        )
    return layout.derived[key]


def forward_launches(
    q_TNH: Tensor, keys: Keys, out_TNW: Tensor, lse_NT: Tensor, layout: AttentionLayout, scale: float, cfg: KernelConfig
) -> list[Launch]:
    """The forward pass: attention, and the merge of split rows where there are any. Writes ``out_TNW``, ``lse_NT``."""
    blocks, num_heads = cfg.forward, q_TNH.shape[1]
    work = _work(layout, blocks, True, num_heads, q_TNH.device)
    (h0, h1), (w0, w1) = split_head_dim(q_TNH.shape[2]), split_head_dim(out_TNW.shape[2])
    part_out = lse_NT.new_empty((work.num_slots, num_heads, blocks.queries, w0 + w1))
    part_lse = lse_NT.new_empty((work.num_slots, num_heads, blocks.queries))
    shared = {
        "out": out_TNW, "lse": lse_NT, "part_out": part_out, "part_lse": part_lse,
        "num_queries": layout.num_queries, "num_heads": num_heads, "M": blocks.queries, "W0": w0, "W1": w1,
        **_strides(out=out_TNW),
    }  # fmt: skip
    args = {
        **shared, **keys.args(), **_work_args(work, layout, q_TNH.device),
        "q": q_TNH, "scale_log2": scale * 1.4426950408889634, "GROUP": num_heads // keys.num_heads, "N": blocks.keys,
        "H0": h0, "H1": h1, "PRECISION": cfg.precision, **_strides(q=q_TNH),
    }  # fmt: skip
    launches = [_persistent(forward.forward_kernel, work, num_heads, args, blocks)]
    if work.num_slots:
        grid = (len(work.splits), num_heads)
        launches.append(Launch(forward.merge_kernel, grid, {**shared, "splits": work.splits}, {"num_warps": 4}))
    return launches


def delta_launch(out_TNW: Tensor, grad_out_TNW: Tensor, delta_NT: Tensor) -> Launch:
    """Writes ``delta_NT``, the dot product of each output row with its gradient."""
    num_queries, num_heads, head_dim = out_TNW.shape
    w0, w1 = split_head_dim(head_dim)
    block = 32
    args = {
        "out": out_TNW, "grad_out": grad_out_TNW, "delta": delta_NT, "num_queries": num_queries, "M": block,
        "W0": w0, "W1": w1, **_strides(out=out_TNW, grad=grad_out_TNW),
    }  # fmt: skip
    return Launch(backward_queries.delta_kernel, (-(-num_queries // block), num_heads), args, {"num_warps": 4})


@dataclass(frozen=True)
class Backward:
    """Inputs that both halves of the backward pass read."""

    q_TNH: Tensor
    keys: Keys
    grad_out_TNW: Tensor
    lse_NT: Tensor
    delta_NT: Tensor
    layout: AttentionLayout
    scale: float
    cfg: KernelConfig

    def args(self, blocks: BlockSizes) -> dict[str, Any]:
        (h0, h1), (w0, w1) = split_head_dim(self.q_TNH.shape[2]), split_head_dim(self.grad_out_TNW.shape[2])
        return {
            **self.keys.args(), "q": self.q_TNH, "grad_out": self.grad_out_TNW, "lse": self.lse_NT,
            "delta": self.delta_NT, "scale": self.scale, "GROUP": self.q_TNH.shape[1] // self.keys.num_heads,
            # With one key a query its weight is 1 whatever q and k are: their gradients are exactly 0.
            "grad_scale": 0.0 if self.layout.is_constant else self.scale,
            "M": blocks.queries, "N": blocks.keys, "H0": h0, "H1": h1, "W0": w0, "W1": w1,
            "PRECISION": self.cfg.precision, "num_queries": self.layout.num_queries,
            **_strides(q=self.q_TNH, grad=self.grad_out_TNW),
        }  # fmt: skip


def dq_launches(inputs: Backward, dq_TNH: Tensor) -> list[Launch]:
    """Writes ``dq_TNH``."""
    blocks, device = inputs.cfg.dq, dq_TNH.device
    num_queries, num_heads, head_dim = dq_TNH.shape
    work = _work(inputs.layout, blocks, True, num_heads, device)
    part_dq = inputs.lse_NT.new_empty((work.num_slots, num_heads, blocks.queries, head_dim))
    shared = {"dq": dq_TNH, "part_dq": part_dq, "num_heads": num_heads, **_strides(dq=dq_TNH)}
    args = {**inputs.args(blocks), **shared, **_work_args(work, inputs.layout, device)}
    launches = [_persistent(backward_queries.dq_kernel, work, num_heads, args, blocks)]
    if work.num_slots:
        h0, h1 = split_head_dim(head_dim)
        shared |= {"splits": work.splits, "num_queries": num_queries, "M": blocks.queries, "H0": h0, "H1": h1}
        grid = (len(work.splits), num_heads)
        launches.append(Launch(backward_queries.add_dq_kernel, grid, shared, {"num_warps": 4}))
    return launches


def dkv_launches(
    inputs: Backward, dk_LKH: Tensor, dv_LKW: Tensor, path_dk: RowTable | None, path_dv: RowTable | None
) -> list[Launch]:
    """Writes the local keys' gradients; adds the path's to the float32 accumulators of the two tables."""
    blocks, device, keys = inputs.cfg.dkv, dk_LKH.device, inputs.keys
    num_heads = keys.num_heads
    work = _work(inputs.layout, blocks, False, num_heads, device)
    part_dk, part_dv = (
        inputs.lse_NT.new_empty((work.num_slots, num_heads, blocks.keys, x.shape[2])) for x in (dk_LKH, dv_LKW)
    )
    args = {
        **inputs.args(blocks), **_work_args(work, inputs.layout, device),
        "dk": dk_LKH, "dv": dv_LKW, "part_dk": part_dk, "part_dv": part_dv, "num_kv_heads": num_heads,
        "path_dk": path_dk.rows_P if path_dk else None, "path_dv": path_dv.rows_P if path_dv else None,
        **_strides(dk=dk_LKH, dv=dv_LKW),
    }  # fmt: skip
    del args["num_items"]
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    launches = [Launch(backward_keys.dkv_kernel, (len(work.items) * num_heads,), args, options)]
    if work.num_slots:
        for grads, part, table in ((dk_LKH, part_dk, path_dk), (dv_LKW, part_dv, path_dv)):
            d0, d1 = split_head_dim(grads.shape[2])
            sums = {
                "grads": grads, "part": part, "splits": work.splits, "path_grads": table.rows_P if table else None,
                "path_lens": table.lens_P if table else None, "num_keys": inputs.layout.num_keys,
                "path_len": keys.path_len, "layer": keys.layer, "num_kv_heads": num_heads, "N": blocks.keys,
                "D0": d0, "D1": d1, "HAS_PATH": table is not None,
                "stride": _row_stride(grads), "head_stride": grads.stride(1),
            }  # fmt: skip
            grid = (len(work.splits), num_heads)
            launches.append(Launch(backward_keys.add_key_grads_kernel, grid, sums, {"num_warps": 4}))
    return launches


def _persistent(kernel: Any, work: Work, num_heads: int, args: dict[str, Any], blocks: BlockSizes) -> Launch:
    grid = (min(len(work.items) * num_heads, work.num_programs),)
    return Launch(kernel, grid, args, {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages})


def _work(layout: AttentionLayout, blocks: BlockSizes, by_query: bool, num_heads: int, device: torch.device) -> Work:
    key = ("triton_work", blocks.queries, blocks.keys, by_query, num_heads, device)
    if key not in layout.derived:
        both = block_tiles(layout, blocks)
        tiles: TileList = both.by_query if by_query else both.by_key
        programs = num_programs(device)
        plan = plan_work(tiles, num_heads, programs, MIN_TILES)
        items, splits, columns = (to_device(x, device) for x in (plan.items, plan.splits, tiles.columns_E))
        layout.derived[key] = Work(items, splits, columns, plan.num_slots, programs)
    return layout.derived[key]


def _intervals(layout: AttentionLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """``first_S`` and ``last_S`` in int32 on the device."""
    key = ("triton_intervals", device)
    if key not in layout.derived:
        layout.derived[key] = tuple(to_device(x.astype("int32"), device) for x in (layout.first_S, layout.last_S))
    return layout.derived[key]


def _work_args(work: Work, layout: AttentionLayout, device: torch.device) -> dict[str, Any]:
    first, last = _intervals(layout, device)
    return {
        "first": first, "last": last, "items": work.items, "tiles": work.tiles, "num_items": len(work.items),
        "num_keys": layout.num_keys, "num_queries": layout.num_queries,
    }  # fmt: skip


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Row and head strides under the kernels' names."""
    strides: dict[str, int] = {}
    for name, x in tensors.items():
        strides[f"{name}_stride"], strides[f"{name}_head_stride"] = _row_stride(x), x.stride(1)
    return strides


def _row_stride(x: Tensor) -> int:
    """A single row has any stride; one that follows from the heads keeps the compiled kernel the same."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]
