"""``use_fused_kernels``: where veRL's fused linear cross-entropy can be had with prefix sharing, and where not.

No torch: a job is checked with it before veRL is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from psrl.errors import UnsupportedError
from psrl.integrations.verl.engine.support import Refusal
from psrl.types import FloatArray

HIDDEN_MULTIPLE = 128
"""Asserted in verl/utils/kernel/kernels.py (efficient_entropy_forward)."""
_LEAST_TEMPERATURE = 1e-8
"""Upstream's, for temperatures that are not positive (padding)."""
_WITHOUT = "set it to False, and psrl.max_logit_rows to bound the logits"


def fused_refusals(config: Any, *, device: str, is_value_model: bool) -> Iterator[Refusal]:
    """Why an engine cannot have it, as far as its configuration tells; nothing where it is not set.

    Args:
        device: type of the engine's device.
    """
    if not config.use_fused_kernels:
        return
    if is_value_model:
        yield _refusal("a value head has no cross-entropy", "set it to False")
    if device != "cuda":
        yield _refusal(f"its kernels are for CUDA, and the device is {device}", _WITHOUT)
    rows = getattr(getattr(config, "psrl", None), "max_logit_rows", None)
    if rows is not None:
        yield _refusal(
            f"no logits exist that psrl.max_logit_rows={rows} could bound",
            "set one of them, the other to False or null",
        )


def check_fused_kernels(engine_config: Any, model_config: Any, *, device: str, is_value_model: bool) -> None:
    """Check it where a model is about to be built, with ``psrl.enable``.

    Args:
        engine_config: ``PSRLEngineConfig``.
        model_config: veRL's ``HFModelConfig``.

    Raises:
        UnsupportedError: it is set and cannot be had; names why, and the way out.
    """
    if not engine_config.use_fused_kernels:
        return
    refusals = list(fused_refusals(engine_config, device=device, is_value_model=is_value_model))
    if find_spec("triton") is None:  # veRL's kernels are mocks then
        refusals.append(
            _refusal("its kernels need Triton, which is not installed", "install triton, or set it to False")
        )
    hidden = model_config.hf_config.hidden_size
    if hidden % HIDDEN_MULTIPLE:
        refusals.append(
            _refusal(f"its kernels take hidden sizes that {HIDDEN_MULTIPLE} divides, not {hidden}", _WITHOUT)
        )
    targets = model_config.lora.get("target_modules") or ()
    if any(target.rpartition(".")[2] == "output_layer" for target in targets):
        refusals.append(
            _refusal(
                "it reads the output layer's weight, which model.lora.target_modules adapts", "leave out output_layer"
            )
        )
    for refusal in refusals:
        raise refusal.error()


def _refusal(reason: str, way_out: str) -> Refusal:
    return Refusal("use_fused_kernels", True, reason, way_out)


def check_fused_batch(asked: bool, built: bool, temperatures_S: FloatArray) -> None:
    """Check a mini-batch of S samples before a plan of it runs.

    Args:
        asked, built: ``use_fused_kernels`` of the batch and of the engine.

    Raises:
        UnsupportedError: they differ, as upstream refuses too, or the samples have several temperatures.
    """
    if bool(asked) != bool(built):
        raise UnsupportedError(
            f"use_fused_kernels={asked} in a batch, but the model was built with {built}: set it in the model's section"
        )
    if built:
        one_temperature(temperatures_S)


def one_temperature(temperatures: FloatArray) -> float:
    """The temperature that all rows, or samples, have; 1 where there are none.

    Raises:
        UnsupportedError: they have several, or none that is finite.
    """
    if not len(temperatures):
        return 1.0
    low, high = float(temperatures.min()), float(temperatures.max())
    if not (low == high and np.isfinite(low)):
        raise UnsupportedError(
            f"use_fused_kernels=True: samples of a mini-batch have temperatures from {low:g} to {high:g}, but veRL's "
            "fused linear cross-entropy takes one for all rows: give them one temperature, or set "
            "use_fused_kernels=False (psrl.max_logit_rows then bounds the logits)"
        )
    return max(low, _LEAST_TEMPERATURE)
