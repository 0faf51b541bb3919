"""Model shapes with what a rank keeps of them, by name or from the ``config.json`` of a Hugging Face folder.

A mixture of experts counts the experts a token goes through.
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.cost import KVFootprint, ModelShape
from psrl.model_sizes import load_model

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """A shape, its name, and bytes of a value."""

    name: str
    shape: ModelShape
    dtype: str = "bfloat16"

    @property
    def footprint(self) -> KVFootprint:
        """Bytes of a token, in the cache and of kept attention, if one rank held all layers and heads.

        Divide by TP x PP for one of several.
        """
        s, itemsize = self.shape, DTYPE_BYTES[self.dtype]
        kept = s.num_layers * s.attention_bytes(itemsize)
        return KVFootprint.of_values(s.num_layers * s.cached_values, itemsize, attention_bytes_per_token=kept)

    @property
    def activation_bytes_per_token(self) -> int:
        """Estimate of what a forward without recompute keeps for its backward, all layers of one token.

        Inputs of the two norms and what they put out, Q, K, V, the attention's output, gate, up and their product.
        """
        s = self.shape
        ffn = s.ffn_size * (3 if s.gated_mlp else 2)
        heads = s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
        if s.latent is not None:
            heads = s.num_heads * 2 * (s.latent.plain_dim + s.latent.rotary_dim + s.latent.value_dim)
        values = 4 * s.hidden_size + heads + ffn
        return s.num_layers * values * DTYPE_BYTES[self.dtype]

    @property
    def logit_bytes_per_row(self) -> int:
        """Logits of a row and their gradient, both float32."""
        return 2 * 4 * self.shape.output_size


def load_shape(name: str, dtype: str = "bfloat16") -> ShapedModel:
    """A named model, a ``config.json``, or a folder with one.

    Raises:
        InputError: no such name or file, or a size is missing or no positive integer.
    """
    return ShapedModel(name, load_model(name, "--shape").shape, dtype)
