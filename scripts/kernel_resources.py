#!/usr/bin/env python3
"""Registers, spills and shared memory of the Triton kernels, compiled for GPUs that need not be there.

    python scripts/kernel_resources.py                  # write the table of docs/kernels.md anew
    python scripts/kernel_resources.py --check          # exit 1 where it differs from the table
    python scripts/kernel_resources.py --jobs 8 --capability 90

One compilation takes 5 to 20 seconds of a core; Triton keeps the results (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from psrl.runtime.attention.triton.aot import SHARED_MEMORY, compile_launch, sample_launches

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- table: scripts/kernel_resources.py -->", "<!-- end of table -->"
KERNELS = ("forward_kernel", "dq_kernel", "dkv_kernel")
HALF_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
COLUMNS = ("device", "dtype", "head dim", "kernel", "keys", "tile (q x k)", "warps, stages")
NUMBERS = ("registers", "spilled bytes", "shared KiB")
HEADER = f"| {' | '.join(COLUMNS + NUMBERS)} |\n|{' --- |' * len(COLUMNS)}{' ---: |' * len(NUMBERS)}"


class Case(NamedTuple):
    capability: int
    dtype: str
    head_dim: int
    v_head_dim: int
    kernel: str
    has_path: bool


def cases(capabilities: list[int]) -> Iterator[Case]:
    for capability in capabilities:
        for dims in HALF_DIMS:
            for kernel in KERNELS:
                for has_path in (False, True):
                    yield Case(capability, "bfloat16", *dims, kernel, has_path)


def table_row(case: Case) -> str:
    """Compile one case and describe it as a row of the table."""
    launches = sample_launches(
        case.head_dim, case.v_head_dim, getattr(torch, case.dtype), case.capability,
        path_lens=(5,) if case.has_path else (),
    )  # fmt: skip
    launch = next(x for x in launches if x.kernel.__name__ == case.kernel)
    found = compile_launch(launch, case.capability)
    dims = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim}/{case.v_head_dim}"
    limit = SHARED_MEMORY[case.capability]
    if found.shared_bytes > limit:
        raise SystemExit(f"{case} takes {found.shared_bytes} bytes of shared memory, the device has {limit}")
    cells = [
        f"sm_{case.capability}", case.dtype, dims, case.kernel.removesuffix("_kernel"),
        "blocks" if case.has_path else "dense", f"{launch.args['M']} x {launch.args['N']}",
        f"{launch.options['num_warps']}, {launch.options['num_stages']}", str(found.registers),
        str(found.spill_bytes), f"{found.shared_bytes / 1024:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time (default: 1)")
    parser.add_argument(
        "--capability", type=int, action="append", choices=sorted(SHARED_MEMORY), help="80, 90, 100 (default: all)"
    )
    options = parser.parse_args()
    capabilities = options.capability or sorted(SHARED_MEMORY)

    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(table_row, cases(capabilities)):
            print(row, flush=True)
            rows.append(row)

    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    kept = [row for row in old.splitlines() if row.startswith("| sm_")]
    devices = [f"| sm_{capability} " for capability in capabilities]
    if options.check:
        differing = set(rows) ^ {row for row in kept if row.startswith(tuple(devices))}
        for row in sorted(differing):
            print(("new: " if row in rows else "page: ") + row, file=sys.stderr)
        return 1 if differing else 0
    kept = [row for row in kept if not row.startswith(tuple(devices))]
    merged = sorted(kept + rows, key=lambda row: int(row.split()[1].removeprefix("sm_")))
    PAGE.write_text("\n".join([before + BEGIN, HEADER, *merged, END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
