"""Attention kernels on shared prefixes, side by side: time, TFLOP/s on visible pairs, bytes, peak memory.

    python benchmarks/attention.py --out attention.json               # on a GPU
    python benchmarks/attention.py --device cpu --scale 0.05          # what runs on CPU, to see that it works

Every backend runs the same forests (tokens once, cached path first). ``unshared`` is flash attention on the samples
as independent sequences, ``dense`` is PyTorch's SDPA with a dense boolean mask. Ratios are to ``unshared``: what
sharing gains, and how near a kernel is to flash attention's rate on the pairs it computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout
from psrl.types import IntArray

BACKENDS = ("triton", "flash", "flex", "sdpa", "unshared", "dense")
BACKWARD_FLOPS = 2.5
"""Of a forward pass: five products of a pair where the forward has two."""
DENSE_LIMIT = 2**30
"""Most (query, key) pairs times heads for which the dense mask is tried."""


class Workload(NamedTuple):
    """A forest with what it stands for."""

    name: str
    first_S: IntArray
    last_S: IntArray
    num_tokens: int
    sample_lens: IntArray
    """Tokens of each sample, shared ones included."""


def grpo(scale: float) -> Workload:
    """One prompt, eight responses."""
    prompt, response, count = int(4096 * scale), int(2048 * scale), 8
    ends = prompt + response * np.arange(1, count + 1)
    last = np.r_[np.full(prompt, ends[-1]), np.repeat(ends, response)]
    return Workload("grpo", np.arange(len(last)), last, len(last), np.full(count, prompt + response))


def steps(scale: float) -> Workload:
    """A trajectory whose steps think aloud: a trunk that grows, and a branch beside each of its segments."""
    segment, thought, count = int(512 * scale), int(256 * scale), 16
    total = count * (segment + thought)
    last = []
    for step in range(count):
        last += [np.full(segment, total), np.full(thought, (step + 1) * (segment + thought))]
    lens = segment * np.arange(1, count + 1) + thought
    return Workload("steps", np.arange(total), np.concatenate(last), total, lens)


def tree(scale: float) -> Workload:
    """A binary tree of turns, seven deep."""
    turn, depth = int(128 * scale), 7
    last: list[IntArray] = []

    def grow(start: int, level: int) -> int:
        place = len(last)
        last.append(np.empty(0, np.int64))
        end = start + turn
        for _ in range(2 if level < depth else 0):
            end = grow(end, level + 1)
        last[place] = np.full(turn, end)
        return end

    total = grow(0, 1)
    return Workload("tree", np.arange(total), np.concatenate(last), total, np.full(2 ** (depth - 1), turn * depth))


def long_path(scale: float) -> Workload:
    """Four short branches that hang off a long cached path."""
    path, branch, count = int(32768 * scale), int(64 * scale) + 1, 4
    total = branch * count
    first = np.r_[np.zeros(path, np.int64), np.arange(total)]
    last = np.r_[np.full(path, total), np.repeat(branch * np.arange(1, count + 1), branch)]
    return Workload("long_path", first, last, total, np.full(count, path + branch))


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "grpo": grpo, "steps": steps, "tree": tree, "long_path": long_path
}  # fmt: skip


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device

    def inputs(self, num_queries: int, num_keys: int, has_grad: bool) -> list[Tensor]:
        """q, k, v, and an output gradient."""
        shapes = [
            (num_queries, self.num_heads, self.head_dim),
            (num_keys, self.num_kv_heads, self.head_dim),
            (num_keys, self.num_kv_heads, self.v_head_dim),
            (num_queries, self.num_heads, self.v_head_dim),
        ]
        tensors = [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]
        return [x.requires_grad_(has_grad) for x in tensors[:3]] + tensors[3:]

    def forward_flops(self, pairs: int) -> float:
        """Two products of a pair, a multiplication and an addition each."""
        return 2.0 * pairs * self.num_heads * (self.head_dim + self.v_head_dim)

    def least_bytes(self, num_queries: int, num_keys: int) -> int:
        """Every input read once and the output written once."""
        of_queries = num_queries * self.num_heads * (self.head_dim + self.v_head_dim)
        of_keys = num_keys * self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return (of_queries + of_keys) * torch.finfo(self.dtype).bits // 8


def attention(backend: str, work: Workload, shape: Shape) -> tuple[Callable[..., Tensor], int, int, int]:
    """The function of q, k, v that a backend times; its queries, keys and visible pairs."""
    if backend == "unshared":
        layout = AttentionLayout.from_cu_seqlens(np.r_[0, np.cumsum(work.sample_lens)])
        inner = "flash" if shape.device.type == "cuda" else "sdpa"
        run = lambda q, k, v: attend_layout(q, k, v, layout, backend=inner)  # noqa: E731
        return run, layout.num_queries, layout.num_keys, layout.visible_pairs
    layout = AttentionLayout.build(work.first_S, work.last_S, work.num_tokens)
    sizes = layout.num_queries, layout.num_keys, layout.visible_pairs
    if backend != "dense":
        return lambda q, k, v: attend_layout(q, k, v, layout, backend=backend), *sizes
    if layout.num_queries * layout.num_keys * shape.num_heads > DENSE_LIMIT:
        raise UnsupportedError(f"dense SDPA is left out where pairs times heads exceed {DENSE_LIMIT}")
    query_T1 = torch.arange(layout.num_queries, device=shape.device)[:, None]
    first_S, last_S = (torch.from_numpy(x).to(shape.device) for x in (layout.first_S, layout.last_S))
    mask_TS = (first_S <= query_T1) & (query_T1 < last_S)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return dense, *sizes


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


def measure(backend: str, work: Workload, shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of the report. A backend that cannot run here says why under ``unsupported``."""
    has_grad = not (backend == "flex" and shape.device.type == "cpu")
    try:
        run, num_queries, num_keys, pairs = attention(backend, work, shape)
        q, k, v, grad = shape.inputs(num_queries, num_keys, has_grad)
        with torch.no_grad():
            forward = seconds(shape.device, repeats, lambda: run(q, k, v))
        flops = shape.forward_flops(pairs)
        row: dict[str, Any] = {
            "visible_pairs": pairs,
            "least_bytes": shape.least_bytes(num_queries, num_keys),
            "forward_ms": forward * 1e3,
            "forward_tflops": flops / forward / 1e12,
        }
        if has_grad:
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


def add_ratios(rows: dict[str, dict[str, Any]]) -> None:
    """Speed-up over ``unshared``, and share of its TFLOP/s, of the forward pass and of forward and backward."""
    base = rows.get("unshared", {})
    for row in rows.values():
        for part in ("forward", "step"):
            if f"{part}_ms" in row and f"{part}_ms" in base:
                row[f"{part}_speedup"] = base[f"{part}_ms"] / row[f"{part}_ms"]
                row[f"{part}_rate"] = row[f"{part}_tflops"] / base[f"{part}_tflops"]


def print_table(name: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = ("forward_ms", "forward_tflops", "forward_speedup", "forward_rate", "step_ms", "step_tflops",
               "step_speedup", "step_rate", "peak_bytes")  # fmt: skip
    print(f"\n{name:10}" + "".join(f"{column:>16}" for column in columns))
    for backend, row in rows.items():
        if "unsupported" in row:
            print(f"{backend:10}  {row['unsupported']}")
            continue
        cells = (f"{row[column]:16.3f}" if column in row else f"{'-':>16}" for column in columns)
        print(f"{backend:10}" + "".join(cells))


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
