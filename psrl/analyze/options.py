"""What an analysis is asked to do, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from psrl.analyze.shapes import DTYPE_BYTES
from psrl.data.chat import MODES
from psrl.errors import ConfigError

DEFAULT_SHAPE = "qwen2.5-7b"
DEFAULT_BUDGETS = (4096, 8192, 16_384, 32_768, 65_536)
_MAX_BUDGET = 1 << 40


@dataclass(frozen=True)
class AnalyzeOptions:
    """One analysis. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range.
    """

    files: tuple[Path, ...]
    shape: str = DEFAULT_SHAPE
    dtype: str = "bfloat16"
    max_tokens: tuple[int, ...] = DEFAULT_BUDGETS
    """Budgets, ascending, each once."""
    memory_gib: float | None = None
    """What the cache and one micro-batch may use. None: no limit."""
    mini_batch: int | None = None
    """Samples of an optimizer step, in input order. None: all."""
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    json: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("dtype", tuple(DTYPE_BYTES))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("mini_batch", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not self.max_tokens:
            raise ConfigError("--max-tokens: no budget is given")
        for budget in self.max_tokens:
            if not 1 <= budget <= _MAX_BUDGET:
                raise ConfigError(f"--max-tokens must be in 1 .. {_MAX_BUDGET}, got {budget}")
        object.__setattr__(self, "max_tokens", tuple(sorted(set(self.max_tokens))))
        if self.memory_gib is not None and not (math.isfinite(self.memory_gib) and self.memory_gib > 0):
            raise ConfigError(f"--memory-gib must be a finite number above 0, got {self.memory_gib}")
        if not self.files:
            raise ConfigError("no input files")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else int(self.memory_gib * (1 << 30))

    def for_report(self) -> dict[str, object]:
        """The options as JSON values."""
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [str(path) for path in self.files]
        values["max_tokens"] = list(self.max_tokens)
        for name in ("json", "html"):
            values[name] = None if values[name] is None else str(values[name])
        return values
