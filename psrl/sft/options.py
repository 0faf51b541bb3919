"""What supervised training is asked to do, checked before anything is read or loaded. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from psrl.data.chat import MODES
from psrl.errors import ConfigError
from psrl.replay.options import DEFAULT_MAX_TOKENS, DTYPES, MAX_SEED

SHARING = ("on", "off")


@dataclass(frozen=True)
class SFTOptions:
    """One training. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range.
    """

    files: tuple[Path, ...]
    model: str
    out: Path
    epochs: int = 1
    batch: int = 16
    """Samples of an optimizer step."""
    lr: float = 1e-5
    warmup: int = 0
    """Steps over which the learning rate rises from 0."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most tokens of a micro-batch. Without sharing at least the longest sample, which veRL cannot split."""
    sharing: str = "on"
    dtype: str = "float32"
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    seed: int = 42
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in (("sharing", SHARING), ("dtype", DTYPES), ("mode", MODES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, low in (("epochs", 1), ("batch", 1), ("max_tokens", 1), ("limit", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed must be in 0 .. {MAX_SEED}, got {self.seed}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr must be a finite number above 0, got {self.lr}")
        if not self.files:
            raise ConfigError("no input files")

    def for_report(self) -> dict[str, object]:
        """The options as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [str(path) for path in self.files]
        for name in ("out", "json"):
            values[name] = None if values[name] is None else str(values[name])
        return values
