"""What `psrl bench` is asked to do, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from psrl.agents.strategies import STRATEGIES
from psrl.errors import ConfigError
from psrl.replay.options import TinyModel
from psrl.systems import SYSTEMS, UNSHARED

CLOCKS = ("elapsed", "processor")
HALF = "psrl_half"
"""psrl with ``plans.half_budget`` of cache on the device; waves, host memory and computing again keep to it."""
COMPARED = (UNSHARED, "tree_packing", "paged", "radix", "psrl", HALF)
ABLATIONS = (
    "psrl", "tree_packing", "no_self_sharing", "no_adaptive_blocks", "no_dynamic_cache", "no_kept_attention",
    "no_token_wise",
)  # fmt: skip
"""psrl, then without: sharing between micro-batches, and each mechanism that its name says."""


@dataclass(frozen=True)
class BenchOptions:
    """One benchmark. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range.
    """

    files: tuple[Path, ...]
    out: Path
    page: Path | None = None
    strategies: tuple[str, ...] = STRATEGIES
    systems: tuple[str, ...] = COMPARED
    tiny: TinyModel = field(default_factory=TinyModel)
    dtype: str = "float32"
    max_tokens: int = 2048
    repeat: int = 3
    limit: int | None = None
    """Chat rows of each file."""
    turns: int | None = None
    """First turns of each row."""
    window: int = 2
    counted_rows: int = 8
    """Rows of each trace, with all their turns, whose plans are counted."""
    tokenizer: str = "bytes"
    shape: str = "qwen2.5-1.5b"
    """Model whose bytes and FLOPs the plans are counted for."""
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    ranks: tuple[int, ...] = (1, 8, 64)
    simulated_model: str = "qwen3-8b"
    calibration: str = "h100-estimate"
    clock: str = "elapsed"
    note: str = ""
    """What a reader of the figures should know of the machine."""
    seed: int = 42

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("no input files")
        for name, values, known in (
            ("strategy", self.strategies, STRATEGIES), ("system", self.systems, (UNSHARED, *SYSTEMS, HALF)),
            ("clock", (self.clock,), CLOCKS), ("dtype", (self.dtype,), ("float32", "float64")),
        ):  # fmt: skip
            for value in values:
                if value not in known:
                    raise ConfigError(f"--{name} must be one of {', '.join(known)}, got {value!r}")
        if UNSHARED not in self.systems or "psrl" not in self.systems:
            raise ConfigError(f"--system needs {UNSHARED} and psrl: the others are compared with them")
        for name in ("max_tokens", "repeat", "limit", "turns", "window", "counted_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for flag, values in (("--length", self.lengths), ("--ranks", self.ranks)):
            if not values or min(values) < 1:
                raise ConfigError(f"{flag} must be at least 1, got {values}")

    def for_report(self) -> dict[str, Any]:
        """The options as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [path.name for path in self.files]
        values["tiny"] = vars(self.tiny)
        del values["out"], values["page"]
        return values
