"""Layer specs of Megatron-Core's TransformerEngine layers, before and after psrl shares prefixes in them, as JSON.

Run as a program of its own where TransformerEngine is not installed: empty classes stand for all that Megatron-Core
names of it, so that Megatron's own code finds TransformerEngine and chooses, wraps and lists its layers as on a GPU.
None of them is built or called.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import json
import sys
from types import ModuleType
from typing import Any

VERSION = "2.9.0"
PACKAGE = "transformer_engine"


class _Placeholder(ModuleType):
    """A module in which every public name with a capital is a class, every other one a module."""

    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        import torch

        value: Any = _Placeholder(f"{self.__name__}.{name}")
        if name[0].isupper():
            value = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.partition(".")[0] == PACKAGE
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Every module of a spec by its place."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    if isinstance(value, ModuleSpec):
        found = {f"{path}.module".lstrip("."): value.module.__name__, f"{path}.params".lstrip("."): repr(value.params)}
        return found | flatten(value.submodules, path)
    if dataclasses.is_dataclass(value):
        found = {}
        for field in dataclasses.fields(value):
            found |= flatten(getattr(value, field.name), f"{path}.{field.name}")
        return found
    if isinstance(value, list):
        return {key: name for i, item in enumerate(value) for key, name in flatten(item, f"{path}[{i}]").items()}
    return {path.lstrip("."): getattr(value, "__name__", repr(value))}


def specs() -> dict[str, Any]:
    """As veRL's bridges ask for them: of a block (mbridge), and of one layer (Megatron-Bridge)."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"}
    experts = {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_layer_freq": [0, 1]}
    block = {"use_transformer_engine": True}
    return {
        "dense": get_gpt_decoder_block_spec(TransformerConfig(**sizes), **block),
        "qk_layernorm": get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True),
        "experts": get_gpt_decoder_block_spec(TransformerConfig(**sizes, **experts), **block),
        "latents": get_gpt_decoder_block_spec(MLATransformerConfig(**sizes, **experts, qk_layernorm=True), **block),
    }


def main() -> None:
    sys.meta_path.insert(0, _Finder())
    from megatron.core import utils

    utils._te_version = utils.PkgVersion(VERSION)  # read from the installed distribution otherwise
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    from psrl.integrations.megatron import cpu_device
    from psrl.integrations.megatron.core_attention import LatentCoreAttention, PrefixCoreAttention
    from psrl.integrations.megatron.layer_spec import share_prefixes_in_spec
    from psrl.integrations.megatron.local_spec import layer_specs, uses_transformer_engine

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    cpu_device.is_active = lambda: False  # as where there is a GPU
    with layer_specs():  # as the engine has it around the bridge's question
        built = specs()
    classes = (TEDotProductAttention, PrefixCoreAttention, LatentCoreAttention)
    print(
        "result "
        + json.dumps(
            {
                "have_te": HAVE_TE,
                "uses_transformer_engine": uses_transformer_engine(),
                "constructor": {c.__name__: list(inspect.signature(c.__init__).parameters) for c in classes},
                "forward": {c.__name__: list(inspect.signature(c.forward).parameters) for c in classes},
                "specs": {
                    name: {"before": flatten(spec), "after": flatten(share_prefixes_in_spec(spec))}
                    for name, spec in built.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
