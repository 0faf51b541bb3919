"""Megatron-Bridge on a machine without TransformerEngine.

Release 0.3.1, the last one for Python 3.11, imports TransformerEngine for its fused adapters, which nothing here
uses: while it is imported, empty classes stand for those that it names. Nothing of TransformerEngine is imitated.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs

_NAMES = ("transformer_engine", "transformer_engine.pytorch")


def import_megatron_bridge() -> None:
    """Import it, or skip the test where it is not installed."""
    import verl.workers.engine  # noqa: F401  everything that it imports decides without the placeholders

    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("Megatron-Bridge is not installed (pip install --no-deps megatron-bridge)")
    if not gpt_layer_specs.HAVE_TE and "megatron.bridge" not in sys.modules:
        placeholders = _placeholders()
        sys.modules.update(placeholders)
        try:
            for name in ("bridge", "bridge.peft.lora", "bridge.peft.utils"):
                importlib.import_module(f"megatron.{name}")
        finally:
            for name in placeholders:
                del sys.modules[name]
    _add_peft_factories()


def _placeholders() -> dict[str, ModuleType]:
    package, module = (ModuleType(name) for name in _NAMES)
    classes = {name: type(name, (torch.nn.Module,), {}) for name in ("Linear", "LayerNormLinear")}
    module.__dict__.update(classes, ops=SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {})))
    package.__dict__["pytorch"] = module
    return dict(zip(_NAMES, (package, module), strict=True))


def _add_peft_factories() -> None:
    """What veRL asks for by name, and releases before 0.5 have not: from a mapping to a LoRA, and the hook that applies
    it. As 0.5.1 defines them."""
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora import LoRA

    if hasattr(utils, "create_peft"):
        return
    fields = {field.name for field in dataclasses.fields(LoRA)}

    def create_peft(config: dict[str, Any], dtype: torch.dtype | None = None) -> LoRA:
        values = {**config, "dim": config["rank"], "lora_dtype": dtype}
        return LoRA(**{name: value for name, value in values.items() if name in fields})

    utils.create_peft = create_peft
    utils.create_peft_hook = lambda peft, training=True: lambda model: peft(model, training=training)
    utils.load_peft_adapter_checkpoint = None  # imported by veRL, called with model.lora.adapter_path only
