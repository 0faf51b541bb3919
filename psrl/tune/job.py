"""Measure tiles and backends for a model's layers, and remember them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.megatron.backend_choice import BackendChoice, measured_choice
from psrl.model_sizes import load_model
from psrl.runtime.attention import path_access
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.records import check_records_folder
from psrl.runtime.attention.trial import FANS, Fan, SecondsOf, call_seconds

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton.tuning import TileTime, Tuning

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

    def layer_shape(self) -> tuple[LayerShape, bool]:
        """And whether attention is latent.

        Raises:
            ConfigError: ``--tp`` ranks cannot share the heads.
            InputError: no such model.
            UnsupportedError: no such device.
        """
        model = load_model(self.model, "MODEL").shape
        heads, ranks = model.num_heads, self.tensor_parallel
        kv_heads = heads if model.latent is not None else model.num_kv_heads
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):  # as Megatron-Core's TransformerConfig
            raise ConfigError(f"--tp {ranks} does not divide {heads} heads on {kv_heads} key/value heads")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError("no CUDA device: kernels are measured where they will run")
        device = torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)
        shape = LayerShape.of_model(model, self.tensor_parallel, getattr(torch, self.dtype), device)
        return shape, model.latent is not None


@dataclass(frozen=True, slots=True)
class TuneResult:
    shape: LayerShape
    tuning: Tuning | None
    """None: Triton is not installed."""
    choice: BackendChoice
    """What ``auto`` is from now on."""


def run_tune(
    options: TuneOptions,
    note: Callable[[TileTime], None],
    *,
    fans: Sequence[Fan] = FANS,
    seconds_of: SecondsOf = call_seconds,
) -> TuneResult:
    """
    Args:
        note: told of every tile that was tried.
        fans, seconds_of: as in ``run_trial``.

    Raises:
        PSRLError: an option, the model, the device or the cache folder is not usable; the message is for the user.
    """
    shape, is_latent = options.layer_shape()
    check_records_folder()
    tuning = None
    if importlib.util.find_spec("triton") is not None:
        from psrl.runtime.attention.triton.tuning import remember_tiles, tune_tiles

        tuning = tune_tiles(shape, fans, seconds_of, note)
        remember_tiles(shape, tuning.tiles)
    in_place = path_access("triton", is_latent=is_latent).in_place
    tiles = None if tuning is None else tuning.tiles
    choice = measured_choice(shape, in_place, tiles, fans=fans, seconds_of=seconds_of)
    return TuneResult(shape, tuning, choice)
