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

from psrl.errors import PSRLError, UnsupportedError
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
    """Run every backend on every stand-in. Draws no numbers from torch's global generators, and leaves no memory of
    the device reserved: a cache's budget is a share of what is free.

    Args:
        in_place: backends that can read a cached path in its blocks do so, as the model would.
        seconds_of: time of a call.

    Raises:
        UnsupportedError: a backend that takes such layers failed; names it, and the way out.
    """
    seconds: dict[str, float] = dict.fromkeys(backends, 0.0)
    refusals: dict[str, str] = {}
    for fan in fans:
        found = _fan_times(list(seconds), StandIn.make(fan, shape), in_place, seconds_of)
        seconds = {backend: seconds[backend] + took for backend, took in found.seconds.items()}
        refusals |= found.refusals
    if shape.device.type == "cuda":
        torch.cuda.empty_cache()
    return TrialTimes(seconds, refusals)


def _fan_times(backends: Sequence[str], stand_in: StandIn, in_place: bool, seconds_of: SecondsOf) -> TrialTimes:
    steps: dict[str, Callable[[], Any]] = {}
    refusals: dict[str, str] = {}
    for backend in backends:
        try:
            step = stand_in.step(backend, in_place and backend in IN_PLACE_BACKENDS)
            step()  # compiles
        except UnsupportedError as refusal:
            refusals[backend] = str(refusal)
        except PSRLError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"attention backend {backend!r} failed while auto was measured ({type(error).__name__}: {error}): "
                "set psrl.attention_backend to another one"
            ) from error
        else:
            steps[backend] = step
    rounds = [{backend: seconds_of(step) for backend, step in steps.items()} for _ in range(ROUNDS)]
    return TrialTimes({backend: statistics.median(x[backend] for x in rounds) for backend in steps}, refusals)


class StandIn(NamedTuple):
    """For a micro-batch: what attention of one layer reads, for all backends."""

    layout: AttentionLayout
    inputs: list[Tensor]
    """q, k and v of local tokens, which ask for gradients."""
    grad_out: Tensor
    path: CachedBlocks | None

    @classmethod
    def make(cls, fan: Fan, shape: LayerShape) -> StandIn:
        generator = torch.Generator(shape.device).manual_seed(0)
        *inputs, grad_out = shape.inputs(fan.num_local, fan.num_local, generator)
        path = CachedBlocks.random(fan.path, _BLOCKS, shape, generator) if fan.path else None
        return cls(fan.layout(), [x.requires_grad_() for x in inputs], grad_out, path)

    def step(self, backend: str, in_place: bool) -> Callable[[], Any]:
        """Forward and backward of one layer: returns dq, dk and dv of local tokens, and adds those of the path to its
        blocks.

        Raises:
            UnsupportedError: Triton is not installed.
        """
        attention: Callable[..., Tensor]
        if self.path is None:
            attention = functools.partial(attend_layout, layout=self.layout, backend=backend)
        else:
            attention = self.path.in_place(self.layout) if in_place else self.path.gathered(self.layout, backend)
        return lambda: torch.autograd.grad(attention(*self.inputs), self.inputs, self.grad_out)
