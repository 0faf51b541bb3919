"""veRL's rollout configuration as this rollout reads it; what it cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from psrl.errors import ConfigError, UnsupportedError

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "float": torch.float32, "float64": torch.float64,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
_KEY = "actor_rollout_ref.rollout"
_MUST_BE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tensor_model_parallel_size", (1,), "a replica is one process"),
    ("data_parallel_size", (1,), "a replica is one process"),
    ("pipeline_model_parallel_size", (1,), "a replica is one process"),
    ("expert_parallel_size", (1, None), "a replica is one process"),
    ("quantization", (None,), "weights are used as the actor has them"),
    ("qat.enable", (False,), "weights are used as the actor has them"),
    ("logprobs_mode", ("processed_logprobs", None), "log-probs are those of the distribution that is sampled"),
    ("repetition_penalty", (1, None), "it is not implemented"),
    ("disable_log_stats", (True,), "it serves no metrics"),
    ("mtp.enable", (False,), "it is not implemented"),
    ("disaggregation.enabled", (False,), "a replica is one process"),
    ("prometheus.enable", (False,), "it serves no metrics"),
)


@dataclass(frozen=True)
class HFEngineSettings:
    """``actor_rollout_ref.rollout.engine_kwargs.hf``."""

    num_threads: int = 1
    """Threads of torch in each replica."""
    prefix_cache_bytes: int = 1 << 30
    """Most bytes of kept prefixes in each replica; ``enable_prefix_caching=False`` sets it to 0."""
    max_prefill_tokens: int = 4096
    """Most prompt tokens of a forward pass."""

    def __post_init__(self) -> None:
        for name, low in (("num_threads", 1), ("prefix_cache_bytes", 0), ("max_prefill_tokens", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{_KEY}.engine_kwargs.hf.{name} must be an integer of at least {low}, got {value!r}")


def read_settings(rollout: Any) -> HFEngineSettings:
    """Check a rollout configuration (veRL's ``RolloutConfig``, or the mapping it is made from) and read our part of it.

    Raises:
        ConfigError: an unknown key of ``engine_kwargs.hf``, or a value out of range.
        UnsupportedError: an option that this rollout cannot do; names it.
    """
    for key, allowed, reason in _MUST_BE:
        value = _get(rollout, key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"{_KEY}.{key}={value!r} is not supported by the hf rollout ({reason}): set it to {allowed[0]!r}, or "
                "use vllm or sglang"
            )
    dtype_of(rollout)
    values = dict(_get(rollout, "engine_kwargs.hf", None) or {})
    known = [f.name for f in fields(HFEngineSettings)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {_KEY}.engine_kwargs.hf.{key}; known keys: {', '.join(known)}")
    if not _get(rollout, "enable_prefix_caching", True):
        values["prefix_cache_bytes"] = 0
    return HFEngineSettings(**values)


def dtype_of(rollout: Any) -> torch.dtype:
    """Raises:
    UnsupportedError: not one of ``DTYPES``.
    """
    name = _get(rollout, "dtype", "float32")
    if name not in DTYPES:
        raise UnsupportedError(f"{_KEY}.dtype={name!r} is not supported by the hf rollout: {', '.join(DTYPES)}")
    return DTYPES[name]


def _get(values: Any, key: str, default: Any) -> Any:
    """A dotted key of a mapping or an object, ``default`` where any part of it is missing or None."""
    for part in key.split("."):
        values = (
            values.get(part) if isinstance(values, Mapping) or hasattr(values, "get") else getattr(values, part, None)
        )
        if values is None:
            return default
    return values
