"""What an offline training is asked to do, checked before anything is read or loaded. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from psrl.data.chat import MODES
from psrl.errors import ConfigError
from psrl.replay.options import (
    DEFAULT_MAX_TOKENS,
    DTYPES,
    LOSS_AGG_MODES,
    LOSSES,
    MAX_SEED,
    RECOMPUTE,
    TinyModel,
    default_loss_agg_mode,
)

OBJECTIVES = ("pg", "sft")
SHARING = ("on", "off")
RESUME = ("auto", "never")


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, as veRL's Megatron engine takes them; what is left of the processes is data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"--vpp {self.vpp} needs --pp above 1: virtual stages are stages of a pipeline")

    def data_parallel_size(self, world_size: int) -> int:
        """
        Raises:
            ConfigError: the processes do not divide.
        """
        model = self.tp * self.pp * self.cp
        if world_size % model:
            raise ConfigError(
                f"{world_size} processes do not divide by --tp {self.tp} x --pp {self.pp} x --cp {self.cp} = {model}"
            )
        data_parallel = world_size // model
        if (data_parallel * self.cp * self.tp) % self.ep:
            raise ConfigError(
                f"--ep {self.ep} does not divide the {data_parallel * self.cp * self.tp} ranks of a stage"
            )
        return data_parallel


@dataclass(frozen=True)
class OfflineOptions:
    """One training. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    files: tuple[Path, ...]
    model: str
    objective: str = "pg"
    """``pg``: veRL's policy loss with the advantages of the samples. ``sft``: veRL's supervised loss."""
    tiny: TinyModel = field(default_factory=TinyModel)
    layout: Layout = field(default_factory=Layout)
    out: Path | None = None
    """Folder for the trained model."""
    epochs: int = 1
    steps: int | None = None
    """Stop with the batch that holds this optimizer step, those before a resume included. None: all epochs."""
    batch: int = 64
    """Samples whose old log-probs are computed with the same weights; of a supervised training, see ``mini_batch``."""
    mini_batch: int | None = None
    """Samples of an optimizer step. None: ``batch``."""
    loss: str = "vanilla"
    loss_agg_mode: str | None = None
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    """Weight of the divergence from the initial model."""
    lr: float = 1e-6
    warmup: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most tokens of a micro-batch. Without sharing at least the longest sample, which veRL cannot split."""
    kv_cache_bytes: int | None = None
    sharing: str = "on"
    dtype: str = "float32"
    recompute: str = "none"
    distributed_optimizer: bool = True
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    seed: int = 42
    checkpoints: Path | None = None
    """Folder of checkpoints. None: none are written."""
    save_every: int | None = None
    """Least number of steps between checkpoints, which are written between batches. None: only at the end."""
    keep: int | None = None
    """Checkpoints that are kept. None: all."""
    resume: str = "auto"
    """``auto``: from the last complete checkpoint, if there is one. ``never``: the folder must not hold any."""
    timeout: float = 600.0
    """Seconds after which a rank that does not answer is given up, and collectives with it."""
    metrics: Path | None = None
    """jsonl file, a line a step; rank 0 appends."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("objective", OBJECTIVES), ("sharing", SHARING), ("dtype", DTYPES), ("mode", MODES),
            ("recompute", RECOMPUTE), ("loss", LOSSES), ("resume", RESUME),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.loss_agg_mode is not None and self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ConfigError(f"--loss-agg-mode must be one of {', '.join(LOSS_AGG_MODES)}, got {self.loss_agg_mode!r}")
        for name, low in (
            ("epochs", 1), ("steps", 1), ("batch", 1), ("mini_batch", 1), ("max_tokens", 1), ("kv_cache_bytes", 1),
            ("limit", 1), ("warmup", 0), ("save_every", 1), ("keep", 1), ("loss_scale_factor", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed must be in 0 .. {MAX_SEED}, got {self.seed}")
        for name, positive in (("lr", True), ("timeout", True), ("entropy_coeff", False), ("kl_coef", False)):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
                kind = "above 0" if positive else "and not negative"
                raise ConfigError(f"--{name.replace('_', '-')} must be a finite number {kind}, got {value}")
        if not self.files:
            raise ConfigError("no input files")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.batch % self.rows_per_step:
            raise ConfigError(f"--batch {self.batch} must be a multiple of --mini-batch {self.mini_batch}")
        if self.checkpoints is None and (self.save_every is not None or self.keep is not None):
            raise ConfigError("--save-every and --keep need --checkpoints")
        if self.objective == "sft":
            for name in ("entropy_coeff", "kl_coef"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} is of the policy loss: not with --objective sft")

    @property
    def rows_per_step(self) -> int:
        """Samples of an optimizer step."""
        return self.mini_batch or self.batch

    @property
    def effective_loss_agg_mode(self) -> str:
        return self.loss_agg_mode or default_loss_agg_mode(self.loss)

    def for_report(self) -> dict[str, object]:
        """The options as JSON values."""
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [str(path) for path in self.files]
        values["tiny"], values["layout"] = vars(self.tiny), vars(self.layout)
        for name in ("out", "checkpoints", "metrics"):
            values[name] = None if values[name] is None else str(values[name])
        return values
