"""How long attention of a layer takes with each backend, on this device: what ``auto`` decides by.

Two stand-ins for micro-batches run forward and backward: branches of a trunk that are all local, and branches of a
cached path. Backends take turns, so that what slows the device slows all of them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from psrl.errors import UnsupportedError
from psrl.runtime.attention.cached_layer import CachedBlocks, LayerShape
from psrl.runtime.attention.dispatch import attend_layout
from psrl.runtime.attention.layout import AttentionLayout
from psrl.runtime.attention.path_access import IN_PLACE_BACKENDS

SecondsOf = Callable[[Callable[[], Any]], float]
ROUNDS = 5
_BLOCKS = 4
"""Of a cached path."""


class Fan(NamedTuple):
    """Branches of equal length that see the whole of what is before them and nothing of each other; tokens."""

    path: int
    """Cached."""
    trunk: int
    """Local."""
    num_branches: int
    branch: int

    @property
    def num_local(self) -> int:
        return self.trunk + self.num_branches * self.branch

    def layout(self) -> AttentionLayout:
        """Keys are path, trunk, branches; queries are trunk and branches."""
        ends = self.trunk + self.branch * np.arange(1, self.num_branches + 1)
        first = np.concatenate([np.zeros(self.path, np.int64), np.arange(self.num_local)])
        shared = np.full(self.path + self.trunk, self.num_local)
        return AttentionLayout.build(first, np.concatenate([shared, np.repeat(ends, self.branch)]), self.num_local)


FANS = (Fan(path=0, trunk=2048, num_branches=8, branch=512), Fan(path=8192, trunk=0, num_branches=16, branch=256))


class TrialTimes(NamedTuple):
    """Of backends that ran, and of the others why they did not."""

    seconds: dict[str, float]
    """Forward and backward of one layer in all stand-ins: the sum of medians."""
    refusals: dict[str, str]


def call_seconds(run: Callable[[], Any]) -> float:
    """Of one call, what the device does included, after two that warm up."""
    return Timer("run()", globals={"run": run}).timeit(1).median


def run_trial(
    backends: Sequence[str],
    shape: LayerShape,
    *,
    in_place: bool,
    fans: Sequence[Fan] = FANS,
    seconds_of: SecondsOf = call_seconds,
) -> TrialTimes:
    """Run every backend on every stand-in. Draws no numbers from torch's global generators.

    Args:
        in_place: backends that can read a cached path in its blocks do so, as the model would.
        seconds_of: time of a call.
    """
    steps: dict[str, list[Callable[[], Any]]] = {}
    refusals: dict[str, str] = {}
    for backend in backends:
        try:
            reads_blocks = in_place and backend in IN_PLACE_BACKENDS
            steps[backend] = [trial_step(backend, fan, shape, reads_blocks) for fan in fans]
            for step in steps[backend]:
                step()  # compiles
        except UnsupportedError as refusal:
            steps.pop(backend, None)
            refusals[backend] = str(refusal)
    seconds = dict.fromkeys(steps, 0.0)
    for index in range(len(fans)):
        rounds = [{backend: seconds_of(calls[index]) for backend, calls in steps.items()} for _ in range(ROUNDS)]
        for backend in steps:
            seconds[backend] += statistics.median(times[backend] for times in rounds)
    return TrialTimes(seconds, refusals)


def trial_step(backend: str, fan: Fan, shape: LayerShape, in_place: bool) -> Callable[[], Any]:
    """Forward and backward of one layer: returns dq, dk and dv of local tokens, and adds those of the path to blocks.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    generator = torch.Generator(shape.device).manual_seed(0)
    layout = fan.layout()
    *inputs, grad_out = shape.inputs(fan.num_local, fan.num_local, generator)
    leaves = [x.requires_grad_() for x in inputs]
    attention: Callable[..., Tensor]
    if fan.path:
        blocks = CachedBlocks.random(fan.path, _BLOCKS, shape, generator)
        attention = blocks.in_place(layout) if in_place else blocks.gathered(layout, backend)
    else:
        attention = functools.partial(attend_layout, layout=layout, backend=backend)
    return lambda: torch.autograd.grad(attention(*leaves), leaves, grad_out)
