"""What `psrl plan` is asked to do, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psrl.analyze.shapes import DTYPE_BYTES
from psrl.data.chat import MODES
from psrl.errors import ConfigError


@dataclass(frozen=True)
class PlanOptions:
    """One plan. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range.
    """

    files: tuple[Path, ...]
    shape: str
    dtype: str = "bfloat16"
    max_tokens: int = 4096
    kv_cache_bytes: int | None = None
    kv_host_bytes: int | None = None
    kv_recompute: bool = True
    forward_only: bool = False
    """The single pass of old log-prob and reference instead of an update."""
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    trace: Path | None = None
    html: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("dtype", tuple(DTYPE_BYTES))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("max_tokens", "kv_cache_bytes", "kv_host_bytes", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not self.files:
            raise ConfigError("no input files")
