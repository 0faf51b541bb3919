"""What ``psrl tune`` is asked to measure. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    model: str
    """A named model, a ``config.json``, or a folder with one."""
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.tensor_parallel < 1:
            raise ConfigError(f"--tp must be at least 1, got {self.tensor_parallel}")
