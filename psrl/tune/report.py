"""What was measured, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from psrl.console import table_console
from psrl.runtime.attention.records import device_name, records_folder
from psrl.tune.job import TuneResult

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton.configs import KernelConfig
    from psrl.runtime.attention.triton.tuning import TileTime


def tile_line(tried: TileTime) -> str:
    """A candidate as it is measured."""
    queries, keys, warps, stages = tried.blocks
    took = "does not fit this device" if tried.seconds is None else f"{tried.seconds * 1e3:.3f} ms"
    return f"{tried.kernel}: {queries} x {keys}, {warps} warps, {stages} stages: {took}"


def print_result(result: TuneResult) -> None:
    console, shape = table_console(), result.shape
    dims = f"{shape.head_dim}" if shape.head_dim == shape.v_head_dim else f"{shape.head_dim}/{shape.v_head_dim}"
    dtype = str(shape.dtype).removeprefix("torch.")
    title = f"{device_name(shape.device)}: {shape.num_heads} heads on {shape.num_kv_heads}, of {dims}, {dtype}"
    if result.tuning is not None:
        table = Table("kernel", "tile (q x k)", "warps, stages", "default's time over it", title=title, box=box.SIMPLE)
        for kernel, row in _rows(result.tuning.tiles, result.tuning.tried).items():
            table.add_row(kernel, *row)
        console.print(table)
    console.print(f"attention: {result.choice}")
    console.print(f"kept in {records_folder()}: jobs on such devices start with it", soft_wrap=True)


def _rows(tiles: KernelConfig, tried: tuple[TileTime, ...]) -> dict[str, tuple[str, str, str]]:
    """Of each kernel the chosen tile; the default is the first that was tried."""
    rows = {}
    for kernel in dict.fromkeys(x.kernel for x in tried):
        chosen = getattr(tiles, kernel)
        times = {x.blocks: x.seconds for x in tried if x.kernel == kernel}
        default, best = next(iter(times.values())), times[chosen]
        assert default is not None and best is not None
        sides = f"{chosen.queries} x {chosen.keys}"
        rows[kernel] = (sides, f"{chosen.num_warps}, {chosen.num_stages}", f"{default / best:.2f}x")
    return rows
