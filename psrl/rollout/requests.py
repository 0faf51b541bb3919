"""Requests of the generator on their way: as asked for, running, answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from psrl.rollout.prefix_cache import TokenIds
from psrl.rollout.sampling import Noise, SamplingParams

STOP, LENGTH, ABORTED = "stop", "length", "aborted"


class Generation(NamedTuple):
    """A response."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token under the distribution it was drawn from (``sample_tokens``)."""
    stop_reason: str
    """``stop`` (a stop token, which is the last of ``token_ids``), ``length`` or ``aborted``."""
    num_cached_tokens: int
    """Prompt tokens whose K/V was reused."""
    experts: Tensor | None = None
    """[tokens - 1, layers with experts, experts of a token] int16 where routes are recorded, of prompt and response but
    for the last token, which no forward pass has seen. A prefix that was reused has the routes of its first time."""


@dataclass
class GeneratorStats:
    """Counters since the generator was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens."""
    generated_tokens: int = 0
    forward_passes: int = 0


@dataclass
class Request:
    handle: int
    prompt: TokenIds
    params: SamplingParams
    noise: Noise


@dataclass
class Row:
    """A running request; its K/V is in the buffer's row of the same index, for all tokens but the last."""

    request: Request
    tokens: list[int]
    """Prompt and response."""
    num_cached: int
    log_probs: list[float] = field(default_factory=list)

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]
