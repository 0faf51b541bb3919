"""Sizes of models by name, or from a Hugging Face ``config.json``: dense or mixture of experts. No weights are read.

Sizes of named models are those of their published ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from psrl.cost import LatentShape, ModelShape
from psrl.errors import InputError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A decoder, the whole of it."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of the dense MLP, or of one expert."""
    vocab_size: int
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 1
    is_tied: bool = False
    """Embedding and output layer are one matrix."""
    latent: LatentShape | None = None
    """Of latent attention, which has no use for ``num_kv_heads`` and ``head_dim``."""

    @property
    def shape(self) -> ModelShape:
        """For the planner: every token goes through ``experts_per_token`` experts."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size * self.experts_per_token,
            output_size=self.vocab_size,
            latent=self.latent,
        )

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        if self.latent is not None:
            return self.latent.projections_size(self.hidden_size, self.num_heads)
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's MLP, or of one expert of it."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding; the output layer has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        layer = self.attention_parameters + max(1, self.num_experts) * self.expert_parameters
        return self.num_layers * layer + self.embedding_parameters * (1 if self.is_tied else 2)

    @property
    def mlp_flops_per_token(self) -> float:
        """Forward FLOPs of a token in one layer's MLP or experts."""
        return 2.0 * self.expert_parameters * self.experts_per_token

    @property
    def attention_flops_per_token(self) -> float:
        """Forward FLOPs of a token in one layer's projections."""
        return 2.0 * self.attention_parameters

    def cached_values(self, tensor_parallel: int) -> int:
        """Numbers that a rank caches of a token in one layer: its heads' K and V, or the latent, on every rank."""
        if self.latent is not None:
            return self.latent.cached_values
        return 2 * max(1, self.num_kv_heads // tensor_parallel) * self.head_dim


_DENSE = (
    ModelSizes("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, is_tied=True),
    ModelSizes("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151_936, is_tied=True),
    ModelSizes("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, is_tied=True),
    ModelSizes("qwen2.5-3b", 36, 2048, 16, 2, 128, 11_008, 151_936, is_tied=True),
    ModelSizes("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064),
    ModelSizes("qwen2.5-14b", 48, 5120, 40, 8, 128, 13_824, 152_064),
    ModelSizes("qwen2.5-32b", 64, 5120, 40, 8, 128, 27_648, 152_064),
    ModelSizes("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151_936, is_tied=True),
    ModelSizes("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936, is_tied=True),
    ModelSizes("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936),
    ModelSizes("qwen3-14b", 40, 5120, 40, 8, 128, 17_408, 151_936),
    ModelSizes("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936),
    ModelSizes("llama3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
    ModelSizes("llama3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
)
_EXPERTS = (
    ModelSizes("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, 128, 8),
    ModelSizes("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151_936, 128, 8),
)
_EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""How Qwen, DeepSeek and Mixtral write it."""
NAMED_MODELS: dict[str, ModelSizes] = {model.name: model for model in (*_DENSE, *_EXPERTS)}


def load_model(name: str, flag: str = "--model") -> ModelSizes:
    """A named model, or the sizes in a ``config.json`` or in a folder that has one.

    Args:
        flag: the option that the user gave the name with.

    Raises:
        InputError: no such name or file, or a size is missing or no positive integer.
    """
    if name in NAMED_MODELS:
        return NAMED_MODELS[name]
    path = Path(name)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{flag} {name}: cannot read {path} ({error.strerror or error}); names are {', '.join(NAMED_MODELS)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object")
    return model_of_config(name, cast(dict[str, Any], config), str(path))


def model_of_config(name: str, config: Mapping[str, Any], where: str) -> ModelSizes:
    """Sizes from a Hugging Face configuration.

    Raises:
        InputError: a size is missing or no positive integer; ``where`` says whose.
    """

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise InputError(f"{where}: {key} must be a positive integer, got {repr(value)[:40]}")
        return value

    num_heads, hidden = size("num_attention_heads"), size("hidden_size")
    count_key = next((key for key in _EXPERT_COUNT_KEYS if config.get(key)), _EXPERT_COUNT_KEYS[0])
    has_experts = bool(config.get(count_key) or config.get("num_experts_per_tok"))
    expert_ffn = config.get("moe_intermediate_size") if has_experts else None
    return ModelSizes(
        name=name,
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", hidden // num_heads),
        ffn_size=size("intermediate_size" if expert_ffn is None else "moe_intermediate_size"),
        vocab_size=size("vocab_size"),
        num_experts=size(count_key) if has_experts else 0,
        experts_per_token=size("num_experts_per_tok") if has_experts else 1,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        latent=None if config.get("kv_lora_rank") is None else _latent_of_config(config, size),
    )


def _latent_of_config(config: Mapping[str, Any], size: Callable[[str], int]) -> LatentShape:
    return LatentShape(
        query_rank=0 if config.get("q_lora_rank") is None else size("q_lora_rank"),
        kv_rank=size("kv_lora_rank"),
        plain_dim=size("qk_nope_head_dim"),
        rotary_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
