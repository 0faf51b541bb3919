"""The cost model's coefficients: their file format, and where they come from.

A calibration says of itself whether it was ``measured`` on a device or is an ``estimate`` from public peak figures. It
is for the numeric type, model family and size it was made for; ``benchmarks/calibrate.py`` measures one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from psrl.errors import ConfigError, InputError

FORMAT = "psrl.simulate.calibration/1"
SOURCES = ("measured", "estimate")
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Direction:
    """Seconds of a forward, or of a backward, as a sum of amounts times these coefficients."""

    per_micro_batch: float
    per_layer: float
    """A layer of a micro-batch: kernel launches, Python."""
    per_tile: float
    """A call of an attention kernel in a layer: about two a tree node, one a packed sequence."""
    per_gemm_flop: float
    """FLOPs of this direction (a backward has twice the forward's)."""
    per_attention_flop: float
    """FLOPs of this direction (a backward has 2.5 times the forward's)."""
    per_output_flop: float
    """Output layer and what follows it: log-probs, loss."""
    per_cached_value: float
    """A number of cached K/V that is read, or whose gradient is accumulated."""
    per_entropy_value: float = 0.0
    """A logit that the entropy is computed from, where it is."""


@dataclass(frozen=True, slots=True)
class CallOverhead:
    """Seconds of a call of the engine outside its micro-batches: batch handling, planning, metrics."""

    per_call: float
    per_sample: float
    per_token: float
    """A token of the samples, shared or not."""
    per_micro_batch: float
    """What this engine adds to every micro-batch on top of ``Direction``."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two processes. Collectives are rings of such connections."""

    latency: float
    """Seconds of a point-to-point transfer of nothing."""
    bandwidth: float
    """Bytes a second, one way."""
    collective_latency: float
    """Seconds of a collective of nothing between two processes; grows with log2 of their number."""
    collective_bandwidth: float
    """Bytes a second that a process sends in a large collective."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """All coefficients. Seconds, bytes and FLOPs."""

    name: str
    source: str
    """``measured`` or ``estimate``."""
    note: str
    """What it was measured on, or what it was estimated from."""
    dtype_bytes: int
    """Bytes of a parameter and of an activation."""
    forward: Direction
    backward: Direction
    shared_call: CallOverhead
    unshared_call: CallOverhead
    per_optimizer_parameter: float
    """Seconds a parameter of the optimizer's step, gradient norm and finalisation included."""
    node: Link
    """Between processes of a node."""
    network: Link
    """Between nodes."""
    processes_per_node: int
    num_cores: int | None = None
    """Cores that all processes share, of the node. None: a device for each process."""
    device_bytes: int | None = None
    """Memory of a device. None: not limited."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ConfigError(f"calibration source must be one of {', '.join(SOURCES)}, got {self.source!r}")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")


def presets() -> tuple[str, ...]:
    """Names of the calibrations that ship with psrl; all of them are estimates."""
    folder = files("psrl.simulate") / "presets"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_calibration(name: str) -> Calibration:
    """A preset by name, or a file.

    Raises:
        InputError: no such preset or file, or the file is not a calibration; names the field.
    """
    if name in presets():
        text = (files("psrl.simulate") / "presets" / f"{name}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"calibration {name}: cannot read the file ({error.strerror or error}), and the presets are "
                f"{', '.join(presets())}; benchmarks/calibrate.py measures a calibration"
            ) from error
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"calibration {name}: broken JSON: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise InputError(f"calibration {name}: expected a JSON object with format {FORMAT!r}")
    nested = {
        "forward": Direction, "backward": Direction, "shared_call": CallOverhead, "unshared_call": CallOverhead,
        "node": Link, "network": Link,
    }  # fmt: skip
    for key, record in nested.items():
        if not isinstance(values.get(key), dict):
            raise InputError(f"calibration {name}: {key} must be an object")
        values[key] = _record(record, values[key], f"calibration {name}: {key}.")
    return _record(Calibration, values, f"calibration {name}: ")


_TEXTS = ("name", "source", "note")
_OPTIONAL = ("num_cores", "device_bytes")


def _record(record: type[_Record], values: Mapping[str, Any], where: str) -> _Record:
    """Build a dataclass of numbers, checked."""
    known = {f.name: f for f in fields(record)}  # pyright: ignore[reportArgumentType]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise InputError(f"{where}{unknown[0]}: no such field; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in values:
            if field.default is MISSING:
                raise InputError(f"{where}{name} is missing")
            continue
        value = values[name]
        if name in _TEXTS:
            if not isinstance(value, str):
                raise InputError(f"{where}{name} must be a text, got {value!r}")
        elif isinstance(value, dict) or (value is None and name in _OPTIONAL) or hasattr(value, "__dataclass_fields__"):
            continue
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise InputError(f"{where}{name} must be a number that is not negative, got {value!r}")
    return record(**values)
