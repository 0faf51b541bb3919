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
from psrl.tune.options import TuneOptions

if TYPE_CHECKING:  # importing it imports Triton
    from psrl.runtime.attention.triton.tuning import TileTime, Tuning


@dataclass(frozen=True, slots=True)
class TuneResult:
    shape: LayerShape
    tuning: Tuning | None
    """None: Triton is not installed."""
    choice: BackendChoice
    """What ``auto`` is from now on."""


def layer_shape(options: TuneOptions) -> tuple[LayerShape, bool]:
    """What is measured, and whether attention is latent.

    Raises:
        ConfigError: ``--tp`` ranks cannot share the heads.
        InputError: no such model.
        UnsupportedError: no such device.
    """
    model = load_model(options.model, "MODEL").shape
    heads, ranks = model.num_heads, options.tensor_parallel
    kv_heads = heads if model.latent is not None else model.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):  # as Megatron-Core's TransformerConfig
        raise ConfigError(f"--tp {ranks} does not divide {heads} heads on {kv_heads} key/value heads")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device: kernels are measured where they will run")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    shape = LayerShape.of_model(model, options.tensor_parallel, getattr(torch, options.dtype), device)
    return shape, model.latent is not None


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
    shape, is_latent = layer_shape(options)
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
