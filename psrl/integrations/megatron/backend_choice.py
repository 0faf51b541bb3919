"""Which attention backend a model runs on, and with which tiles: as configured, or as measured on this device.

``auto`` on CUDA is measured once for a kind of device, model layer and versions of what runs it, by rank 0 for all
ranks, and remembered (``records``). Only backends that are deterministic and keep attention's results take part:
FlexAttention is neither everywhere, and takes a minute to compile. The tiles of the Triton kernels are those that
``psrl tune`` has measured there, or the default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from psrl.errors import PSRLError, RankError, UnsupportedError
from psrl.runtime.attention import KEEPING_BACKENDS, resolve_backend
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.records import kind_of, read_record, write_record
from psrl.runtime.attention.trial import FANS, Fan, SecondsOf, TrialTimes, call_seconds, run_trial

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton.configs import KernelConfig

CLEARLY_SLOWER = 1.05
"""How much of the fastest backend's time an earlier one may take and still be chosen: ``triton``, which comes first,
copies nothing of a cached path and so needs less memory."""


class BackendChoice(NamedTuple):
    name: str
    detail: str = ""
    """How ``auto`` came to it; empty where the configuration names it."""
    tiles: KernelConfig | None = None
    """Measured ones, of the Triton kernels."""

    @classmethod
    def unmeasured(cls, backend: str, device_type: str) -> BackendChoice:
        """
        Raises:
            ConfigError: ``backend`` is unknown.
        """
        return cls(resolve_backend(backend, device_type), "auto" if backend == "auto" else "")

    def __str__(self) -> str:
        notes = [self.detail] if self.detail else []
        if self.name == "triton" and self.tiles is not None:
            notes.append("tuned tiles")
        return f"{self.name} ({'; '.join(notes)})" if notes else self.name


def choose_backend(backend: str, shape: LayerShape, *, in_place: bool) -> BackendChoice:
    """The backend for such layers; sets the tiles of the Triton kernels. On CUDA it is collective over all ranks.

    Args:
        backend: ``psrl.attention_backend``.
        shape: of the model's layers on this rank.
        in_place: the model can read a cached path in its blocks, with a backend that can.

    Raises:
        ConfigError: ``backend`` is unknown.
        UnsupportedError: ``auto``, and no backend runs such layers on this device.
    """
    choice = BackendChoice.unmeasured(backend, shape.device.type)
    if shape.device.type != "cuda":
        return choice

    def find() -> BackendChoice:
        tiles = _tuned_tiles(shape)
        if backend != "auto":
            return choice._replace(tiles=tiles)
        return measured_choice(shape, in_place, tiles)

    return agreed_choice(find, shape)


def agreed_choice(find: Callable[[], BackendChoice], shape: LayerShape) -> BackendChoice:
    """What ``find`` returns or raises on rank 0, on all ranks; sets its tiles. Collective.

    Raises:
        RankError: on the other ranks, where ``find`` raised what is none of psrl's errors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        choice = find()
    else:
        outcome: list[BackendChoice | PSRLError | None] = [None]
        if dist.get_rank() == 0:
            outcome[0] = _outcome(find)
        dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], PSRLError):
            raise outcome[0]
        assert outcome[0] is not None
        choice = outcome[0]
    if choice.tiles is not None:
        _set_tiles(shape, choice.tiles)
    return choice


def _outcome(find: Callable[[], BackendChoice]) -> BackendChoice | PSRLError:
    """Also an error that psrl did not expect ends all ranks: they wait for what rank 0 finds."""
    try:
        return find()
    except PSRLError as error:
        return error
    except Exception as error:
        dist.broadcast_object_list([RankError(f"rank 0 failed while it chose the attention backend: {error!r}")])
        raise


def measured_choice(
    shape: LayerShape,
    in_place: bool,
    tiles: KernelConfig | None = None,
    candidates: Sequence[str] = KEEPING_BACKENDS,
    *,
    fans: Sequence[Fan] = FANS,
    seconds_of: SecondsOf = call_seconds,
) -> BackendChoice:
    """The candidate to run such layers with, measured here unless that has been done.

    Args:
        tiles: of the Triton kernels; None: the default.
        fans, seconds_of: as in ``run_trial``.

    Raises:
        UnsupportedError: no candidate runs them.
    """
    kind = kind_of(
        "backends",
        shape,
        {"tiles": _as_json(tiles), "candidates": list(candidates)},
        heads=[shape.num_heads, shape.num_kv_heads],
        path="in place" if in_place else "gathered",
    )
    times = read_record(kind, lambda values: _times(values, candidates))
    if times is None:
        if tiles is not None:
            _set_tiles(shape, tiles)
        times = run_trial(candidates, shape, in_place=in_place, fans=fans, seconds_of=seconds_of)
        write_record(kind, times._asdict())
    return choice_of(times, candidates)._replace(tiles=tiles)


def choice_of(times: TrialTimes, candidates: Sequence[str]) -> BackendChoice:
    """The first candidate that is not clearly slower than the fastest.

    Raises:
        UnsupportedError: none has run.
    """
    seconds = times.seconds
    if not seconds:
        reasons = "; ".join(f"{backend}: {refusal}" for backend, refusal in times.refusals.items())
        raise UnsupportedError(f"no attention backend runs this model here: {reasons}")
    limit = CLEARLY_SLOWER * min(seconds.values())
    name = next(backend for backend in candidates if seconds.get(backend, limit + 1) <= limit)
    others = [f"{other} takes {seconds[other] / seconds[name]:.2f}x its time" for other in candidates
              if other in seconds and other != name]  # fmt: skip
    others += [f"{other} cannot run" for other in candidates if other in times.refusals]
    return BackendChoice(name, ", ".join(["auto, measured", *others]))


def _times(values: Any, candidates: Sequence[str]) -> TrialTimes:
    """
    Raises:
        ValueError: not of these candidates, or no seconds.
        TypeError, KeyError: other JSON.
    """
    seconds, refusals = dict(values["seconds"]), dict(values["refusals"])
    if {*seconds, *refusals} != {*candidates} or not all(x > 0 for x in seconds.values()):
        raise ValueError(f"no times of {', '.join(candidates)}: {values}")
    return TrialTimes(seconds, refusals)


def _tuned_tiles(shape: LayerShape) -> KernelConfig | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from psrl.runtime.attention.triton.tuning import remembered_tiles

    return remembered_tiles(shape)


def _set_tiles(shape: LayerShape, tiles: KernelConfig) -> None:
    from psrl.runtime.attention.triton.configs import use_tiles

    use_tiles(shape.head_dim, shape.v_head_dim, shape.dtype, tiles)


def _as_json(tiles: KernelConfig | None) -> list[object] | None:
    return None if tiles is None else [*map(list, tiles[:3]), tiles.precision]
