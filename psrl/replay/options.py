"""What a replay is asked to do, checked before anything is read or loaded. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from psrl.config import ATTENTION_BACKENDS
from psrl.data.chat import MODES
from psrl.errors import ConfigError
from psrl.systems import SYSTEMS

SHARING = ("on", "off", "both")
DTYPES = ("float32", "float64", "bfloat16")
RECOMPUTE = ("none", "selective", "full")
TINY_MODELS = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe")
TINY_EXPERTS = 4
"""Experts of ``tiny-qwen3-moe``, of which a token visits two."""
LOSSES = (
    "vanilla", "gspo", "sapo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro", "geo_mean", "clip_cov", "kl_cov",
    "bypass_mode",
)  # fmt: skip
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DEFAULT_MAX_TOKENS = 4096
MAX_SEED = (1 << 32) - 1
"""NumPy takes no larger one."""
MIN_TEMPERATURE = 1e-6
"""Logits divided by less leave the range of float32."""


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the random models that ``--model tiny-...`` makes."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads"):
            _at_least(_flag(name), getattr(self, name), 1)
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"--hidden {self.hidden} must be a multiple of 2 x --heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")


@dataclass(frozen=True)
class Parallel:
    """Sizes of a replay's parallel layout. It starts ``tp x pp x cp x dp`` processes."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks of each pipeline stage."""
    cp: int = 1
    """Ranks that split every micro-batch's tokens."""
    ep: int = 1
    """Ranks over which experts are spread, among those of ``tp x cp x dp``."""
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp"):
            _at_least(_flag(name), getattr(self, name), 1)
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"--vpp {self.vpp} needs --pp of at least 2")
        if (self.tp * self.cp * self.dp) % self.ep:
            raise ConfigError(f"--ep {self.ep} must divide --tp x --cp x --dp, which is {self.tp * self.cp * self.dp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class ReplayOptions:
    """One replay. Names follow the command line; messages name the flag.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    files: tuple[Path, ...]
    model: str = "tiny-qwen2"
    tiny: TinyModel = field(default_factory=TinyModel)
    parallel: Parallel = field(default_factory=Parallel)
    sharing: str = "on"
    system: str = "psrl"
    """Whose policies the side that shares follows."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Most tokens of a micro-batch on each of ``cp`` ranks. Without sharing at least the longest sample, which veRL
    cannot split."""
    dtype: str = "float32"
    attention: str = "auto"
    unshared_attention: str | None = None
    """Of the side without sharing, where its layers are not TransformerEngine's. None: ``attention``."""
    recompute: str = "none"
    kv_cache_bytes: int | None = None
    kv_host_bytes: int | None = None
    kv_recompute: bool = True
    loss: str = "vanilla"
    loss_agg_mode: str | None = None
    """None: ``default_loss_agg_mode``."""
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    temperature: float = 1.0
    lr: float = 1e-6
    steps: int = 1
    repeat: int = 1
    mini_batch: int | None = None
    """Samples of a mini-batch. None: all."""
    limit: int | None = None
    tokenizer: str | None = None
    mode: str = "step"
    seed: int = 42
    tolerance: float | None = None
    """Largest relative difference that ``--sharing both`` accepts. None: by dtype."""
    dump: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("sharing", SHARING), ("system", tuple(SYSTEMS)), ("dtype", DTYPES), ("attention", ATTENTION_BACKENDS),
            ("recompute", RECOMPUTE), ("loss", LOSSES), ("mode", MODES),
        ):  # fmt: skip
            _one_of(_flag(name), getattr(self, name), choices)
        if self.unshared_attention is not None:
            _one_of("--unshared-attention", self.unshared_attention, ATTENTION_BACKENDS)
        if self.loss_agg_mode is not None:
            _one_of("--loss-agg-mode", self.loss_agg_mode, LOSS_AGG_MODES)
        for name in (
            "max_tokens", "kv_cache_bytes", "kv_host_bytes", "loss_scale_factor", "steps", "repeat", "mini_batch",
            "limit",
        ):  # fmt: skip
            _at_least(_flag(name), getattr(self, name), 1)
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"--seed must be in 0 .. {MAX_SEED}, got {self.seed}")
        for name in ("entropy_coeff", "kl_coef", "temperature", "lr", "tolerance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{_flag(name)} must be a finite number and not negative, got {value}")
        if self.system != "psrl" and not self.shares:
            raise ConfigError(f"--system {self.system} is a way of sharing: it needs --sharing on or both")
        if self.kv_host_bytes is not None and self.parallel.pp > 1:
            raise ConfigError(f"--kv-host-bytes needs the plan's order, which --pp {self.parallel.pp} does not keep")
        if self.kv_host_bytes is not None and self.system != "psrl":
            raise ConfigError(f"--kv-host-bytes is psrl's own: it does not go with --system {self.system}")
        if self.temperature < MIN_TEMPERATURE:
            raise ConfigError(f"--temperature must be at least {MIN_TEMPERATURE:g}, got {self.temperature:g}")
        if self.parallel.ep > 1 and self.model in TINY_MODELS and self.model != "tiny-qwen3-moe":
            raise ConfigError(f"--ep {self.parallel.ep}: {self.model} has no experts; use --model tiny-qwen3-moe")
        if not self.files:
            raise ConfigError("no input files")

    @property
    def effective_loss_agg_mode(self) -> str:
        return self.loss_agg_mode or default_loss_agg_mode(self.loss)

    @property
    def shares(self) -> bool:
        return self.sharing in ("on", "both")

    def attention_of(self, *, shares: bool) -> str:
        """Attention backend of a side."""
        return self.attention if shares else self.unshared_attention or self.attention

    def for_report(self) -> dict[str, object]:
        """The options as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = [str(path) for path in self.files]
        values["loss_agg_mode"] = self.effective_loss_agg_mode
        values["tiny"] = vars(self.tiny) if self.model in TINY_MODELS else None
        values["parallel"] = vars(self.parallel)
        for name in ("dump", "json"):
            values[name] = None if values[name] is None else str(values[name])
        return values


def default_loss_agg_mode(loss: str) -> str:
    """``token-mean``; for gspo what its paper does."""
    return "seq-mean-token-mean" if loss == "gspo" else "token-mean"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")


def _at_least(flag: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{flag} must be at least {low}, got {value}")
