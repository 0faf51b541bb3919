"""The K/V of the running requests, one row each, and the forward pass that reads and extends it. Where routes are
recorded, the experts of every token too.

A token's slot in its row is its position, so a query at position p sees the slots 0 .. p of its row and nothing else is
needed to mask. Padding queries write to the slot after the row's last token, which that row overwrites next.

Shape legend: L layers, R rows, H key/value heads, G query heads per key/value head, C slots, D head size, B rows of a
forward pass, Q queries a row, K slots that it reads, S a span of slots, E layers with experts, X experts of a token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from psrl.errors import UnsupportedError
from psrl.rollout.prefix_cache import Span
from psrl.rollout.routes import RouteCollector

ATTENTION = "psrl_rollout"
"""Name under which ``slot_attention`` is registered with transformers."""
SUPPORTED_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` whose logits are the output embedding of the last hidden state, and whose attention is plain."""
_GROWTH = 1.5


class KVBuffer:
    """K/V of all layers in one tensor [L, 2, R, H, C, D] that grows on demand, routes in one [E, 1, R, C, X]."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, routes: RouteCollector | None
    ) -> None:
        self._data = [torch.zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim, dtype=dtype)]
        self._routes = routes
        if routes is not None:
            self._data.append(torch.zeros(routes.size[0], 1, 0, 0, routes.size[1], dtype=torch.int16))

    @classmethod
    def for_config(cls, config: Any, dtype: torch.dtype, routes: RouteCollector | None = None) -> KVBuffer:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, config.num_key_value_heads, head_dim, dtype, routes)

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self._data)

    @property
    def bytes_per_token(self) -> int:
        return sum(
            math.prod(data.shape[:2]) * math.prod(data.shape[3:-2]) * data.shape[-1] * data.element_size()
            for data in self._data
        )

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Make room; keeps what is stored."""
        rows, slots = self._data[0].shape[2], self._data[0].shape[-2]
        if num_rows <= rows and num_slots <= slots:
            return
        new_rows = rows if num_rows <= rows else max(num_rows, int(rows * _GROWTH))
        new_slots = slots if num_slots <= slots else max(num_slots, int(slots * _GROWTH))
        for index, data in enumerate(self._data):
            grown = data.new_zeros(*data.shape[:2], new_rows, *data.shape[3:-2], new_slots, data.shape[-1])
            grown[:, :, :rows, ..., :slots, :] = data
            self._data[index] = grown

    def clear(self) -> None:
        """Give the memory back."""
        self._data = [data.new_zeros(*data.shape[:2], 0, *data.shape[3:-2], 0, data.shape[-1]) for data in self._data]

    def write(self, row: int, start: int, span: Span) -> None:
        for data, values in zip(self._data, span, strict=True):
            data[:, :, row, ..., start : start + values.shape[-2], :] = values

    def read(self, row: int, start: int, end: int) -> Span:
        """A copy of the slots ``start`` .. ``end`` - 1."""
        return tuple(data[:, :, row, ..., start:end, :].clone() for data in self._data)

    def move(self, source: int, target: int, num_slots: int) -> None:
        for data in self._data:
            data[:, :, target, ..., :num_slots, :] = data[:, :, source, ..., :num_slots, :]

    def rows(self, start: int, positions_BQ: Tensor) -> _Rows:
        """The rows from ``start`` on as what transformers takes for a cache."""
        return _Rows(self._data[0][:, :, start : start + len(positions_BQ)], positions_BQ)

    def keep_routes(self, start: int, positions_BQ: Tensor) -> None:
        """Store the experts of the last forward pass, whose tokens are in the rows from ``start`` on."""
        if self._routes is not None:
            rows_B1 = torch.arange(start, start + len(positions_BQ))[:, None]
            self._data[1][:, 0, rows_B1, positions_BQ] = self._routes.take(positions_BQ.shape)

    def routes(self, row: int, num_slots: int) -> Tensor | None:
        """[S, E, X] a copy of the first slots' experts; None where they are not recorded."""
        if self._routes is None:
            return None
        return self._data[1][:, 0, row, :num_slots].transpose(0, 1).clone()


class _Rows:
    """Stores the K/V of new tokens at their positions, and returns all up to the last of them."""

    def __init__(self, data_L2BHCD: Tensor, positions_BQ: Tensor) -> None:
        self._data, self._positions = data_L2BHCD, positions_BQ
        self._index = torch.arange(len(positions_BQ))[:, None]
        self._num_slots = int(positions_BQ.max()) + 1

    def update(self, key_BHQD: Tensor, value_BHQD: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys_BHCD, values_BHCD = self._data[layer]
        keys_BHCD[self._index, :, self._positions] = key_BHQD.transpose(1, 2)
        values_BHCD[self._index, :, self._positions] = value_BHQD.transpose(1, 2)
        return keys_BHCD[:, :, : self._num_slots], values_BHCD[:, :, : self._num_slots]


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, without repeating K/V: query heads of a group are further queries.

    Args:
        query: [B, H * G, Q, D].
        key, value: [B, H, K, D].
        attention_mask: [B, 1, G * Q, K] bool, from ``visible_slots``.

    Returns:
        [B, Q, H * G, D], and no weights.
    """
    B, num_heads, Q, D = query.shape
    H = key.shape[1]
    query = query.reshape(B, H, num_heads // H * Q, D)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.reshape(B, num_heads, Q, D).transpose(1, 2), None


def visible_slots(positions_BQ: Tensor, group_size: int) -> Tensor:
    """[B, 1, G * Q, K] slots that each query sees."""
    slots_K = torch.arange(int(positions_BQ.max()) + 1)
    return (slots_K <= positions_BQ[:, None, :, None]).repeat(1, 1, group_size, 1)


def check_model_type(config: Any) -> None:
    """Raises:
    UnsupportedError: the model needs more than plain attention and an output embedding.
    """
    if config.model_type not in SUPPORTED_MODELS:
        raise UnsupportedError(
            f"model_type {config.model_type!r} is not supported by the hf rollout (supported: "
            f"{', '.join(SUPPORTED_MODELS)}): use vllm or sglang"
        )
    if getattr(config, "use_sliding_window", False) or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    ):
        raise UnsupportedError("use_sliding_window=True is not supported by the hf rollout: use vllm or sglang")


def load_model(path: str, dtype: torch.dtype) -> Any:
    """The checkpoint in ``path`` with ``slot_attention``, for inference.

    Raises:
        UnsupportedError: as ``check_model_type``.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    check_model_type(AutoConfig.from_pretrained(path))
    AttentionInterface.register(ATTENTION, slot_attention)
    experts = "eager" if dtype == torch.float64 else None  # torch's grouped product, the default, has no float64
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=ATTENTION, experts_implementation=experts
    )
    return model.eval().requires_grad_(False)


def last_hidden_states(model: Any, buffer: KVBuffer, first_row: int, ids_BQ: Tensor, positions_BQ: Tensor) -> Tensor:
    """[B, Q, hidden] of new tokens; stores what ``buffer`` keeps of them in the rows from ``first_row`` on, which must
    have room."""
    config = model.config
    hidden = model.base_model(
        input_ids=ids_BQ,
        position_ids=positions_BQ,
        attention_mask=visible_slots(positions_BQ, config.num_attention_heads // config.num_key_value_heads),
        past_key_values=buffer.rows(first_row, positions_BQ),
        use_cache=True,
    ).last_hidden_state
    buffer.keep_routes(first_row, positions_BQ)
    return hidden
