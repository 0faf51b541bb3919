"""Ranks whose layers communicate run equal numbers of micro-batches: the shorter ones add dummies.

Experts are spread over data-parallel ranks, which have plans of their own; interleaved schedules want a multiple of
their group size. Ranks that share a plan (tensor, pipeline, context parallel) need nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from psrl.runtime.session import DUMMY
from psrl.types import Wave


def align_waves(
    waves: Sequence[Wave],
    *,
    forward_only: bool,
    multiple: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[Wave, ...]:
    """The waves with ``DUMMY`` micro-batches at the end of passes, and empty-handed waves at the end.

    Every rank of ``group`` gets the same number of waves and, wave by wave, passes of the same length. A pass of
    length 0 stays empty where it is empty everywhere, but the last pass of an update has at least one micro-batch:
    gradients are synchronised in it.

    Args:
        forward_only: the plan has no second pass.
        multiple: lengths of passes are rounded up to a multiple of it.
        group: ranks that run in step; None: this rank alone. Collective over it.
        device: of the collectives' tensors.
    """
    num_waves = _largest([len(waves)], group, device)[0]
    padded = [*waves, *[Wave((), ())] * (num_waves - len(waves))]
    lengths = _largest([len(part) for wave in padded for part in wave], group, device)
    if not forward_only:
        lengths[-1] = max(1, lengths[-1])
    sizes = [-(-length // multiple) * multiple for length in lengths]
    return tuple(
        Wave(_filled(wave.pass1, sizes[2 * i]), _filled(wave.pass2, sizes[2 * i + 1])) for i, wave in enumerate(padded)
    )


def _filled(order: tuple[int, ...], size: int) -> tuple[int, ...]:
    return order + (DUMMY,) * (size - len(order))


def _largest(values: list[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Element-wise maximum over the group."""
    if group is None:
        return values
    largest = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
