"""Sampling parameters of one request, and sampling of one token for each of several requests.

Shape legend: B requests, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.errors import UnsupportedError

_NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0, "skip_special_tokens": None, "spaces_between_special_tokens": None, "detokenize": None,
}  # fmt: skip
"""Parameters of other engines by the value at which they do nothing (None: any value)."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response.

    Raises:
        UnsupportedError: a value is out of range; names the parameter.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    """Beside the end-of-sequence ids. A stop token is part of the response."""
    ignore_eos: bool = False
    seed: int | None = None
    """None: the engine's, with the request's id; else the prompt alone decides beside it."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UnsupportedError(f"sampling parameter temperature={self.temperature!r} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise UnsupportedError(f"sampling parameter top_p={self.top_p!r} must be in (0, 1]")
        if self.top_k < -1:
            raise UnsupportedError(f"sampling parameter top_k={self.top_k!r} must be -1 (all tokens) or more")
        if self.max_tokens < 1:
            raise UnsupportedError(f"sampling parameter max_tokens={self.max_tokens!r} must be at least 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
        """From the mapping that veRL's agent loops send (``logprobs`` is not ours and is left alone).

        Args:
            max_tokens: where the mapping has neither ``max_tokens`` nor ``max_new_tokens``.

        Raises:
            UnsupportedError: a parameter that this rollout does not implement, unless it has no effect; names it.
        """
        rest = {key: value for key, value in values.items() if value is not None and key != "logprobs"}
        limit = rest.pop("max_tokens", rest.pop("max_new_tokens", max_tokens))
        found: dict[str, Any] = {"max_tokens": int(limit), "ignore_eos": bool(rest.pop("ignore_eos", ignore_eos))}
        for name, kind in (("temperature", float), ("top_p", float), ("top_k", int), ("seed", int)):
            if name in rest:
                found[name] = kind(rest.pop(name))
        found["stop_token_ids"] = frozenset(map(int, rest.pop("stop_token_ids", ())))
        for name, value in rest.items():
            if name in _NEUTRAL and _NEUTRAL[name] in (None, value):
                continue
            if isinstance(value, list | tuple | dict | str) and not value:
                continue
            raise UnsupportedError(f"sampling parameter {name}={value!r} is not supported by the hf rollout")
        return cls(**found)


class Noise:
    """The random numbers of one response: a function of seed, request and prompt, whatever else runs beside it."""

    def __init__(self, seed: int, request_id: str, prompt_ids: Sequence[int]) -> None:
        digest = hashlib.blake2b(f"{seed}\0{request_id}\0".encode(), digest_size=16)
        digest.update(np.asarray(prompt_ids, dtype=np.int64).tobytes())
        self._random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))

    def next(self) -> float:
        """Uniform in [0, 1)."""
        return float(self._random.random())


def sample_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token for each row.

    Args:
        uniforms: one random number in [0, 1) a row; greedy rows do not use it.

    Returns:
        Tokens, and their log-probs under the distribution they were drawn from: after temperature, top_k and top_p, as
        vLLM's ``processed_logprobs``. Greedy rows: under the model's distribution at temperature 1.
    """
    scaled_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
    if any(t != 1.0 for t in temperatures):
        scaled_BV = scaled_BV / torch.tensor(temperatures, dtype=scaled_BV.dtype)[:, None]
    for row, p in enumerate(params):
        if not p.is_greedy and (p.top_k > 0 or p.top_p < 1):
            scaled_BV = scaled_BV.clone() if scaled_BV is logits_BV else scaled_BV
            scaled_BV[row] = _truncate(scaled_BV[row], p)
    log_probs_BV = scaled_BV.log_softmax(-1)
    tokens_B = log_probs_BV.argmax(-1)
    drawn = [row for row, p in enumerate(params) if not p.is_greedy]
    if drawn:
        cumulative_BV = log_probs_BV[drawn].double().exp_().cumsum_(-1)
        points_B1 = torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64)[:, None] * cumulative_BV[:, -1:]
        # The first token whose cumulative probability exceeds the point; rounding may put the point at the very end.
        index_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True)
        last_B1 = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())
        tokens_B[drawn] = torch.minimum(index_B1, last_B1)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    return tokens_B.tolist(), log_probs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()


def _truncate(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Everything outside top_k, then outside top_p of what is left, at minus infinity."""
    if 0 < params.top_k < len(scaled_V):
        smallest = scaled_V.topk(params.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < smallest, -math.inf)
    if params.top_p < 1:
        ordered_V, order_V = scaled_V.sort(descending=True, stable=True)
        probs_V = ordered_V.softmax(-1)
        outside_V = probs_V.cumsum(-1) - probs_V >= params.top_p  # probability before a token; never the first one
        outside_V[0] = False
        scaled_V = scaled_V.masked_fill(torch.zeros_like(outside_V).scatter(0, order_V, outside_V), -math.inf)
    return scaled_V
