"""Attention kernels on shared prefixes, side by side: time, TFLOP/s on visible pairs, bytes, peak memory.

    python benchmarks/attention.py --out attention.json               # on a GPU
    python benchmarks/attention.py --device cpu --scale 0.05          # what runs on CPU, to see that it works

Every backend runs the same forests (tokens once, cached path first). ``unshared`` is flash attention on the samples
as independent sequences, ``dense`` is PyTorch's SDPA with a dense boolean mask. Ratios are to ``unshared``: what
sharing gains, and how near a kernel is to flash attention's rate on the pairs it computes.

Where a forest has a cached path, ``triton`` finds it in front of the local keys. ``in_place`` and ``gathered`` find it
in blocks, as a layer of psrl does: the same kernels, which read the blocks and add to their float32 accumulators, or
run on a copy whose gradients are added afterwards. Their ratio is ``*_over_gathered``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from attention_forests import WORKLOADS, Shape, Workload
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout
from psrl.runtime.attention.cached_layer import CachedBlocks

WAYS = ("in_place", "gathered")
"""Of the Triton kernels, to a cached path in blocks."""
BACKENDS = ("triton", *WAYS, "flash", "flex", "sdpa", "unshared", "dense")
BACKWARD_FLOPS = 2.5
"""Of a forward pass: five products of a pair where the forward has two."""
DENSE_LIMIT = 2**30
"""Most (query, key) pairs times heads for which the dense mask is tried."""


class Case(NamedTuple):
    """What a backend times."""

    run: Callable[..., Tensor]
    """Of q and of k and v without what is in blocks."""
    layout: AttentionLayout
    num_local_keys: int


def attention(backend: str, work: Workload, shape: Shape) -> Case:
    """
    Raises:
        UnsupportedError: the backend has nothing to run.
    """
    if backend == "unshared":
        layout = AttentionLayout.from_cu_seqlens(np.r_[0, np.cumsum(work.sample_lens)])
        inner = "flash" if shape.device.type == "cuda" else "sdpa"
        return Case(lambda q, k, v: attend_layout(q, k, v, layout, backend=inner), layout, layout.num_keys)
    layout = AttentionLayout.build(work.first_S, work.last_S, work.num_tokens)
    if backend in WAYS:
        if not work.path_len:
            raise UnsupportedError("this forest has no cached path")
        blocks = CachedBlocks.random(work.path_len, work.num_blocks, shape)
        run = blocks.in_place(layout) if backend == "in_place" else blocks.gathered(layout, "triton")
        return Case(run, layout, work.num_tokens)
    if backend != "dense":
        return Case(lambda q, k, v: attend_layout(q, k, v, layout, backend=backend), layout, layout.num_keys)
    if layout.num_queries * layout.num_keys * shape.num_heads > DENSE_LIMIT:
        raise UnsupportedError(f"dense SDPA is left out where pairs times heads exceed {DENSE_LIMIT}")
    query_T1 = torch.arange(layout.num_queries, device=shape.device)[:, None]
    first_S, last_S = (torch.from_numpy(x).to(shape.device) for x in (layout.first_S, layout.last_S))
    mask_TS = (first_S <= query_T1) & (query_T1 < last_S)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return Case(dense, layout, layout.num_keys)


def seconds(device: torch.device, repeats: int, run: Callable[[], Any]) -> float:
    """Median time of a call, after two that warm up (and compile)."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Of what autograd keeps of a forward until its backward; what is kept twice counts once."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()  # kept while it counts, or an address is taken again
    del out
    return sum(found.values())


def measure(backend: str, work: Workload, shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of the report. A backend that cannot run here says why under ``unsupported``."""
    has_grad = not (backend == "flex" and shape.device.type == "cpu")
    try:
        run, layout, num_local_keys = attention(backend, work, shape)
        *inputs, grad = shape.inputs(layout.num_queries, num_local_keys)
        q, k, v = (x.requires_grad_(has_grad) for x in inputs)
        with torch.no_grad():
            forward = seconds(shape.device, repeats, lambda: run(q, k, v))
        flops = shape.forward_flops(layout.visible_pairs)
        row: dict[str, Any] = {
            "visible_pairs": layout.visible_pairs,
            "least_bytes": shape.least_bytes(layout.num_queries, layout.num_keys),
            "forward_ms": forward * 1e3,
            "forward_tflops": flops / forward / 1e12,
        }
        if has_grad:
            row["saved_bytes"] = saved_bytes(lambda: run(q, k, v))
            if shape.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(shape.device)
                before = torch.cuda.memory_allocated(shape.device)
                torch.autograd.grad(run(q, k, v), (q, k, v), grad)
                row["peak_bytes"] = torch.cuda.max_memory_allocated(shape.device) - before
            both = seconds(shape.device, repeats, lambda: torch.autograd.grad(run(q, k, v), (q, k, v), grad))
            row["step_ms"] = both * 1e3
            row["step_tflops"] = flops * (1 + BACKWARD_FLOPS) / both / 1e12
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    return row


def tiles_of(shape: Shape, is_default: bool) -> str:
    """Which tiles the Triton kernels run from now on: those that ``psrl tune`` has measured here, or the default."""
    if not is_default and importlib.util.find_spec("triton") is not None:
        from psrl.runtime.attention.triton.configs import use_tiles
        from psrl.runtime.attention.triton.tuning import remembered_tiles

        if (tiles := remembered_tiles(shape)) is not None:
            use_tiles(shape.head_dim, shape.v_head_dim, shape.dtype, tiles)
            return str(tiles)
    return "default"


def add_ratios(rows: dict[str, dict[str, Any]]) -> None:
    """Of the forward pass, and of forward and backward: speed-up over ``unshared`` and share of its TFLOP/s; of
    ``in_place`` its speed-up over ``gathered``."""
    unshared, gathered = rows.get("unshared", {}), rows.get("gathered", {})
    for part in ("forward", "step"):
        for row in rows.values():
            if f"{part}_ms" in row and f"{part}_ms" in unshared:
                row[f"{part}_speedup"] = unshared[f"{part}_ms"] / row[f"{part}_ms"]
                row[f"{part}_rate"] = row[f"{part}_tflops"] / unshared[f"{part}_tflops"]
        if f"{part}_ms" in rows.get("in_place", {}) and f"{part}_ms" in gathered:
            rows["in_place"][f"{part}_over_gathered"] = gathered[f"{part}_ms"] / rows["in_place"][f"{part}_ms"]


def print_table(name: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = ("forward_ms", "forward_tflops", "forward_speedup", "forward_rate", "step_ms", "step_tflops",
               "step_speedup", "step_rate", "saved_bytes", "peak_bytes")  # fmt: skip
    print(f"\n{name:10}" + "".join(f"{column:>16}" for column in columns))
    for backend, row in rows.items():
        if "unsupported" in row:
            print(f"{backend:10}  {row['unsupported']}")
            continue
        cells = (f"{row[column]:16.3f}" if column in row else f"{'-':>16}" for column in columns)
        print(f"{backend:10}" + "".join(cells))
    ratios = [(part, row[f"{part}_over_gathered"]) for row in rows.values() for part in ("forward", "step")
              if f"{part}_over_gathered" in row]  # fmt: skip
    if ratios:
        print("in_place over gathered: " + ", ".join(f"{part} {ratio:.3f}x" for part, ratio in ratios))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", type=int, nargs=2, default=[12, 2], metavar=("QUERY", "KV"))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128], help="one, or that of q and k and that of v")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--default-tiles", action="store_true", help="whatever psrl tune has measured")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: run on a GPU node, or with --device cpu --scale 0.05")
    device = torch.device(options.device)
    num_heads, num_kv_heads = options.heads
    head_dims = options.head_dim[0], options.head_dim[-1]
    shape = Shape(num_heads, num_kv_heads, *head_dims, getattr(torch, options.dtype), device)
    torch.manual_seed(0)

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tiles": tiles_of(shape, options.default_tiles),
        "options": {name: str(value) for name, value in vars(options).items()},
        "workloads": {},
    }
    for name in options.workloads:
        work = WORKLOADS[name](options.scale)
        rows = {backend: measure(backend, work, shape, options.repeats) for backend in options.backends}
        add_ratios(rows)
        print_table(name, rows)
        report["workloads"][name] = {
            "tokens": work.num_tokens,
            "keys": len(work.first_S),
            "unshared_tokens": int(work.sample_lens.sum()),
            "backends": rows,
        }
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
