"""What a simulation is asked to do, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from psrl.data.chat import MODES
from psrl.errors import ConfigError
from psrl.simulate.cluster import ClusterLayout
from psrl.simulate.costs import RECOMPUTE

DEFAULT_MODEL, DEFAULT_CALIBRATION, DEFAULT_MAX_TOKENS = "qwen3-8b", "h100-estimate", 8192
SHARING = ("on", "off", "both")


@dataclass(frozen=True)
class SimulateOptions:
    """One simulation. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    files: tuple[Path, ...]
    ranks: int = 8
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    model: str = DEFAULT_MODEL
    calibration: str = DEFAULT_CALIBRATION
    sharing: str = "both"
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most tokens of a micro-batch on a context-parallel rank."""
    infer_max_tokens: int | None = None
    """None: as ``max_tokens``."""
    mini_batches: int = 1
    replicas: int = 1
    kv_cache_bytes: int | None = None
    recompute: str = "full"
    distributed_optimizer: bool = True
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in (("sharing", SHARING), ("recompute", RECOMPUTE), ("mode", MODES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in (
            "ranks", "tp", "pp", "vpp", "cp", "ep", "max_tokens", "infer_max_tokens", "mini_batches", "replicas",
            "kv_cache_bytes", "limit",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not self.files:
            raise ConfigError("no input files")

    @property
    def layout(self) -> ClusterLayout:
        """
        Raises:
            ConfigError: the sizes do not fit the ranks.
        """
        return ClusterLayout(self.ranks, self.tp, self.pp, self.vpp, self.cp, self.ep)

    def for_report(self) -> dict[str, object]:
        """The options as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [str(path) for path in self.files]
        values["json"] = None if self.json is None else str(self.json)
        return values
