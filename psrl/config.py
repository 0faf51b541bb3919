"""The ``psrl`` configuration group, validated once, frozen afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from psrl.errors import ConfigError

ATTENTION_BACKENDS = ("auto", "reference", "sdpa", "triton", "flash", "flex")
LOSS_SCOPES = ("auto", "sample", "mini_batch")


@dataclass(frozen=True)
class PSRLConfig:
    """Settings of prefix sharing. Error messages name the key as users write it (``psrl.max_tokens``)."""

    enable: bool = True
    """Share prefixes. False runs veRL's own Megatron path, unchanged."""
    max_tokens: int | None = None
    """Token budget of a micro-batch in the update, for each context-parallel rank. None: the engine's
    ``max_token_len_per_gpu``."""
    infer_max_tokens: int | None = None
    """The same in forward-only phases. None: the engine's ``infer_max_token_len_per_gpu``."""
    kv_cache_bytes: int | None = None
    """Most bytes of cached K/V and gradient accumulators on a rank. None: ``kv_cache_fraction`` of the device
    memory that is free when a mini-batch starts (no limit on CPU)."""
    kv_cache_fraction: float = 0.5
    """Share of the free device memory that the cache may take when ``kv_cache_bytes`` is None."""
    kv_host_bytes: int | None = None
    """Most bytes of (pinned) host memory on a rank for what ``kv_cache_bytes`` cannot hold even in waves. None or 0: no
    host tier."""
    kv_host_flops_per_byte: float = 16_000.0
    """FLOPs that the device does in the time a byte takes to or from the host: what decides between the host tier and
    computing prefixes again where either would do."""
    kv_recompute: bool = True
    """Compute prefixes again, for each micro-batch that needs them, where nothing else keeps the cache within its
    budget. False: such a mini-batch is an error."""
    keep_attention: bool = True
    """An update keeps attention's outputs of spine tokens between its passes, as far as the cache's budget has room;
    its second forward of the others computes attention too."""
    attention_backend: str = "auto"
    """``auto`` is measured on CUDA and ``sdpa`` elsewhere; ``flash`` and ``flex`` are other kernels for CUDA;
    ``reference`` is dense and for tests."""
    max_logit_rows: int | None = None
    """Most rows of logits that exist at a time: a micro-batch's log-probs are computed in chunks, in the backward once
    more. None: all rows of a micro-batch at once, kept for the backward."""
    loss_scope: str = "auto"
    """``sample``: the loss is a sum over samples, each evaluated once at its completion. ``mini_batch``: the loss
    couples samples; one more forward pass computes all log-probs first. ``auto`` knows veRL's losses and takes
    ``mini_batch`` for any other."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "infer_max_tokens", "kv_cache_bytes", "kv_host_bytes", "max_logit_rows"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"psrl.{name} must be an integer or null, got {value!r}")
            low = 0 if name == "kv_host_bytes" else 1
            if value < low:
                raise ConfigError(f"psrl.{name} must be at least {low}, got {value}")
        for name in ("enable", "kv_recompute", "keep_attention"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"psrl.{name} must be true or false, got {getattr(self, name)!r}")
        if not self.kv_host_flops_per_byte > 0.0:
            raise ConfigError(f"psrl.kv_host_flops_per_byte must be above 0, got {self.kv_host_flops_per_byte}")
        if not 0.0 < self.kv_cache_fraction <= 1.0:
            raise ConfigError(f"psrl.kv_cache_fraction must be in (0, 1], got {self.kv_cache_fraction}")
        for name, choices in (("attention_backend", ATTENTION_BACKENDS), ("loss_scope", LOSS_SCOPES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"psrl.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PSRLConfig:
        """Build from a config mapping.

        Raises:
            ConfigError: an unknown key, or a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown key psrl.{key}; known keys: {', '.join(known)}")
        return cls(**dict(values))
