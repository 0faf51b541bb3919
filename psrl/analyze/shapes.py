"""Model shapes by name, or from the ``config.json`` of a Hugging Face folder. No weights are read.

Sizes are those of the published configurations. A mixture of experts counts the experts a token goes through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.cost import KVFootprint, ModelShape
from psrl.errors import InputError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv_heads, head_dim, ffn, vocab)


def _experts(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, expert_ffn: int, per_token: int, vocab: int
) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv_heads, head_dim, expert_ffn * per_token, vocab)


NAMED_SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": _dense(30, 576, 9, 3, 64, 1536, 49_152),
    "qwen2.5-0.5b": _dense(24, 896, 14, 2, 64, 4864, 151_936),
    "qwen2.5-1.5b": _dense(28, 1536, 12, 2, 128, 8960, 151_936),
    "qwen2.5-3b": _dense(36, 2048, 16, 2, 128, 11_008, 151_936),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 128, 18_944, 152_064),
    "qwen2.5-14b": _dense(48, 5120, 40, 8, 128, 13_824, 152_064),
    "qwen2.5-32b": _dense(64, 5120, 40, 8, 128, 27_648, 152_064),
    "qwen3-1.7b": _dense(28, 2048, 16, 8, 128, 6144, 151_936),
    "qwen3-4b": _dense(36, 2560, 32, 8, 128, 9728, 151_936),
    "qwen3-8b": _dense(36, 4096, 32, 8, 128, 12_288, 151_936),
    "qwen3-14b": _dense(40, 5120, 40, 8, 128, 17_408, 151_936),
    "qwen3-32b": _dense(64, 5120, 64, 8, 128, 25_600, 151_936),
    "llama3-8b": _dense(32, 4096, 32, 8, 128, 14_336, 128_256),
    "llama3-70b": _dense(80, 8192, 64, 8, 128, 28_672, 128_256),
    "qwen3-30b-a3b": _experts(48, 2048, 32, 4, 128, 768, 8, 151_936),
    "qwen3-235b-a22b": _experts(94, 4096, 64, 4, 128, 1536, 8, 151_936),
}


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """A shape, its name, and bytes of a value."""

    name: str
    shape: ModelShape
    dtype: str = "bfloat16"

    @property
    def footprint(self) -> KVFootprint:
        """Cache bytes of a token if one rank held all layers and heads; divide by TP x PP for one of several."""
        s = self.shape
        return KVFootprint.of_layers(s.num_layers, s.num_kv_heads, s.head_dim, DTYPE_BYTES[self.dtype])

    @property
    def activation_bytes_per_token(self) -> int:
        """Estimate of what a forward without recompute keeps for its backward, all layers of one token.

        Inputs of the two norms and what they put out, Q, K, V, the attention's output, gate, up and their product.
        """
        s = self.shape
        ffn = s.ffn_size * (3 if s.gated_mlp else 2)
        values = 4 * s.hidden_size + s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads) + ffn
        return s.num_layers * values * DTYPE_BYTES[self.dtype]

    @property
    def logit_bytes_per_row(self) -> int:
        """Logits of a row and their gradient, both float32."""
        return 2 * 4 * self.shape.output_size


def load_shape(name: str, dtype: str = "bfloat16") -> ShapedModel:
    """A named shape, a ``config.json``, or a folder with one.

    Raises:
        InputError: no such name or file, or a size is missing or no positive integer.
    """
    if name in NAMED_SHAPES:
        return ShapedModel(name, NAMED_SHAPES[name], dtype)
    path = Path(name)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--shape {name}: cannot read {path} ({error.strerror or error}); named shapes are "
            f"{', '.join(NAMED_SHAPES)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object")
    return ShapedModel(name, _shape_of(config, str(path)), dtype)


def _shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            shown = repr(value)
            raise InputError(f"{where}: {key} must be a positive integer, got {shown[:40]}")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    if config.get("num_experts_per_tok"):
        ffn = size("moe_intermediate_size", config.get("intermediate_size")) * size("num_experts_per_tok")
    else:
        ffn = size("intermediate_size")
    return ModelShape(
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        ffn_size=ffn,
        output_size=size("vocab_size"),
    )
