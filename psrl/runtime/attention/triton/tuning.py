"""Tiles of the Triton kernels by measurement: a few around the default of each kernel, timed on this device.

Keyed on device, head dims and dtype. No length decides them, so that a new length neither compiles nor tunes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from psrl.errors import UnsupportedError
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.records import Kind, kind_of, read_record, write_record
from psrl.runtime.attention.trial import FANS, ROUNDS, Fan, SecondsOf, StandIn, call_seconds
from psrl.runtime.attention.triton.backend import INTERPRETER_MAJOR
from psrl.runtime.attention.triton.configs import PRECISIONS, BlockSizes, KernelConfig, kernel_config, use_tiles

KERNELS = ("forward", "dq", "dkv")
MIN_BLOCK = 16
MIN_GAIN = 0.02
"""Share of a layer's time below which a tile is no better than the default."""


class TileTime(NamedTuple):
    """A candidate and the time of a layer's forward and backward with it; None: the device has no room for it."""

    kernel: str
    blocks: BlockSizes
    seconds: float | None


class Tuning(NamedTuple):
    tiles: KernelConfig
    tried: tuple[TileTime, ...]


def candidates(blocks: BlockSizes) -> Iterator[BlockSizes]:
    """The default, and its neighbours: fewer warps, half or twice a side, another stage."""
    queries, keys, warps, stages = blocks
    found = dict.fromkeys((
        blocks,
        BlockSizes(queries, keys, warps // 2, stages),
        BlockSizes(queries // 2, keys, warps // 2, stages),
        BlockSizes(queries, keys // 2, warps, stages),
        BlockSizes(queries, keys * 2, warps, stages),
        BlockSizes(queries, keys, warps, stages + 1),
    ))  # fmt: skip
    return (x for x in found if min(x.queries, x.keys) >= MIN_BLOCK and x.num_warps >= 4)


def tune_tiles(
    shape: LayerShape,
    fans: Sequence[Fan] = FANS,
    seconds_of: SecondsOf = call_seconds,
    note: Callable[[TileTime], None] = lambda tried: None,
) -> Tuning:
    """Time candidates of one kernel after the other, each with the best found for the kernels before it.

    The tiles that calls of these head dims and dtype use are as before when it returns.

    Args:
        note: told of every candidate.

    Raises:
        UnsupportedError: no kernel for this device, dtype or head dim, or the default tiles do not fit the device.
    """
    key = shape.head_dim, shape.v_head_dim, shape.dtype
    use_tiles(*key, None)
    best = kernel_config(*key, _major(shape.device))
    steps = [StandIn.make(fan, shape).step("triton", in_place=True) for fan in fans]
    tried: list[TileTime] = []
    try:
        for kernel in KERNELS:
            default, *others = candidates(getattr(best, kernel))
            least = _time(best, steps, key, seconds_of)
            tried.append(TileTime(kernel, default, least))
            note(tried[-1])
            limit = least * (1 - MIN_GAIN)
            for blocks in others:
                config = best._replace(**{kernel: blocks})
                tried.append(TileTime(kernel, blocks, _time_if_it_fits(config, steps, key, seconds_of)))
                note(tried[-1])
            fits = [x for x in tried if x.kernel == kernel and x.seconds is not None and x.seconds <= limit]
            if fits:
                best = best._replace(**{kernel: min(fits, key=lambda x: x.seconds or 0.0).blocks})
    finally:
        use_tiles(*key, None)
    return Tuning(best, tuple(tried))


def remember_tiles(shape: LayerShape, tiles: KernelConfig) -> None:
    write_record(_kind(shape), {"tiles": tiles})


def remembered_tiles(shape: LayerShape) -> KernelConfig | None:
    """What ``remember_tiles`` was given on such a device; None: nothing, or with other versions."""
    return read_record(_kind(shape), _tiles)


def _tiles(values: Any) -> KernelConfig:
    """
    Raises:
        ValueError: no sizes.
        TypeError, KeyError: other JSON.
    """
    *kernels, precision = values["tiles"]
    forward, dq, dkv = (BlockSizes(*sizes) for sizes in kernels)
    if precision not in PRECISIONS or not all(isinstance(x, int) and x > 0 for x in (*forward, *dq, *dkv)):
        raise ValueError(f"no tiles: {values['tiles']}")
    return KernelConfig(forward, dq, dkv, precision)


def _kind(shape: LayerShape) -> Kind:
    return kind_of("tiles", shape)


def _time(
    config: KernelConfig,
    steps: Sequence[Callable[[], Any]],
    key: tuple[int, int, torch.dtype],
    seconds_of: SecondsOf,
) -> float:
    use_tiles(*key, config)
    for step in steps:
        step()  # compiles
    return sum(statistics.median(seconds_of(step) for _ in range(ROUNDS)) for step in steps)


def _time_if_it_fits(*args: Any) -> float | None:
    try:
        return _time(*args)
    except UnsupportedError:  # of the tiles: the default ones have run on this device
        return None


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else INTERPRETER_MAJOR
