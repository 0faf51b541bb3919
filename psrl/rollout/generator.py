"""Generation for many requests at once: continuous batching over steps, with reuse of the K/V of known prefixes.

Plain torch and transformers, no Ray and no threads: the caller submits requests and calls ``step`` until it is idle.

Shape legend: B requests, Q new tokens a request (the longest), V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psrl.errors import ConfigError, InputError, RolloutError
from psrl.rollout.kv_buffer import KVBuffer, last_hidden_states
from psrl.rollout.prefix_cache import PrefixCache, TokenIds, common_length
from psrl.rollout.requests import ABORTED, LENGTH, STOP, Generation, GeneratorStats, Request, Row
from psrl.rollout.routes import RouteCollector
from psrl.rollout.sampling import Noise, SamplingParams, sample_tokens
from psrl.rollout.weights import WeightUpdate

_WORTH_WAITING = 16
"""A request waits one forward pass for another one if that computes at least so many tokens of its prompt for it."""


class Generator:
    """Runs requests on one model. A response does not depend on what else runs, up to floating-point rounding."""

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Iterable[int] = (),
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        max_prefill_tokens: int = 4096,
        prefix_cache_bytes: int = 1 << 30,
        record_routes: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: from ``load_model``.
            eos_token_ids: end a response unless its ``ignore_eos``.
            max_num_seqs: most requests that run at once.
            max_model_len: most tokens of a prompt and its response; None: the model's ``max_position_embeddings``.
            max_prefill_tokens: most prompt tokens of a forward pass, padding included (a request alone may have more).
            prefix_cache_bytes: budget of kept prefixes; 0 keeps none.
            record_routes: answer with the experts of every token.
            seed: with a request's id and prompt, what its random numbers derive from.
        """
        for name, value in (("max_num_seqs", max_num_seqs), ("max_prefill_tokens", max_prefill_tokens)):
            if value < 1:
                raise ConfigError(f"rollout: {name} must be at least 1, got {value}")
        self.model = model
        self.max_model_len = max_model_len or int(model.config.max_position_embeddings)
        self.stats = GeneratorStats()
        self._eos = frozenset(eos_token_ids)
        self._max_num_seqs, self._max_prefill_tokens, self._seed = max_num_seqs, max_prefill_tokens, seed
        self._buffer = KVBuffer.for_config(model.config, model.dtype, RouteCollector(model) if record_routes else None)
        self._cache = PrefixCache(prefix_cache_bytes)
        self._waiting: deque[Request] = deque()
        self._rows: list[Row] = []
        self._num_submitted = 0
        self._update: WeightUpdate | None = None

    # ------------------------------------------------------------------------------------------------------ requests
    @property
    def is_idle(self) -> bool:
        return not (self._rows or self._waiting)

    def submit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; returns a handle for it, which is unique even where request ids are not.

        Raises:
            InputError: the prompt is empty, has an id outside the vocabulary, or leaves no room for a token.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        vocab_size = self.model.config.vocab_size
        if prompt.ndim != 1 or not len(prompt):
            raise InputError(f"request {request_id}: the prompt must be a list of at least one token id")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise InputError(f"request {request_id}: token ids must be in 0 .. {vocab_size - 1}")
        if len(prompt) >= self.max_model_len:
            raise InputError(
                f"request {request_id}: a prompt of {len(prompt)} tokens leaves no room in max_model_len "
                f"{self.max_model_len}"
            )
        # With a seed of the request's own, its id does not matter: it may be another one every time.
        drawn_from = (self._seed, request_id) if params.seed is None else (params.seed, "")
        noise = Noise(*drawn_from, prompt_ids)
        self._num_submitted += 1
        self._waiting.append(Request(self._num_submitted, prompt, params, noise))
        return self._num_submitted

    def step(self) -> dict[int, Generation]:
        """Admit what fits, then one token for every running request. Returns what has finished, by handle.

        Raises:
            RolloutError: the weights are being replaced, or the model's logits are not finite.
        """
        if self._update is not None:
            raise RolloutError("the weights are being replaced, or their last replacement failed")
        finished: dict[int, Generation] = {}
        with torch.inference_mode():
            while self._waiting and len(self._rows) < self._max_num_seqs:
                self._prefill(self._next_wave())
                finished |= self._collect()
            if self._rows:
                self._decode()
                finished |= self._collect()
        return finished

    def generate(self, requests: Iterable[tuple[str, Sequence[int], SamplingParams]]) -> list[Generation]:
        """Submit all (id, prompt, parameters) and run them to their ends; responses in order."""
        handles = [self.submit(*request) for request in requests]
        finished: dict[int, Generation] = {}
        while not self.is_idle:
            finished |= self.step()
        return [finished[handle] for handle in handles]

    def abort_all(self) -> dict[int, Generation]:
        """End every request with what it has; those that have not begun have no tokens."""
        aborted = {row.request.handle: self._finish(index, ABORTED) for index, row in enumerate(self._rows)}
        aborted |= {request.handle: Generation([], [], ABORTED, 0) for request in self._waiting}
        self._rows.clear()
        self._waiting.clear()
        return aborted

    # ------------------------------------------------------------------------------------------------ cache, weights
    def clear_cache(self) -> None:
        """Forget all prefixes; with nothing running, give the buffer's memory back too."""
        self._cache.clear()
        if not self._rows:
            self._buffer.clear()

    @property
    def cached_bytes(self) -> int:
        return self._cache.num_bytes

    def begin_update(self) -> None:
        """Start replacing the weights; forgets all prefixes. ``step`` is refused until ``finish_update``.

        Raises:
            RolloutError: requests are running.
        """
        if not self.is_idle:
            raise RolloutError(f"weights cannot change while {len(self._rows) + len(self._waiting)} requests run")
        self.clear_cache()
        self._update = WeightUpdate(self.model)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """A part of the weights, as ``WeightUpdate.load``."""
        assert self._update is not None, "begin_update first"
        self._update.load(tensors)

    def finish_update(self) -> int:
        """Number of tensors loaded; as ``WeightUpdate.finish``."""
        assert self._update is not None, "begin_update first"
        num_tensors = self._update.finish()
        self._update = None
        return num_tensors

    # ----------------------------------------------------------------------------------------------------- execution
    def _next_wave(self) -> list[Request]:
        """Requests of the next prefill, at least one. One whose prompt the wave is about to compute for it waits."""
        wave: list[Request] = []
        deferred: list[Request] = []
        longest = 0
        while self._waiting and len(self._rows) + len(wave) < self._max_num_seqs:
            request = self._waiting.popleft()
            known = self._cache.match_length(request.prompt[:-1])
            if self._cache.max_bytes and any(
                common_length(request.prompt[:-1], other.prompt) >= known + _WORTH_WAITING for other in wave
            ):
                deferred.append(request)
                continue
            longest = max(longest, len(request.prompt) - known)
            if wave and (len(wave) + 1) * longest > self._max_prefill_tokens:
                deferred.append(request)
                break
            wave.append(request)
        self._waiting.extendleft(reversed(deferred))
        return wave

    def _prefill(self, wave: list[Request]) -> None:
        """Compute the prompts beyond what is cached, and each response's first token."""
        first_row = len(self._rows)
        self._buffer.reserve(first_row + len(wave), max(len(request.prompt) for request in wave) + 1)
        starts = []
        for row, request in enumerate(wave, start=first_row):
            start = 0
            for piece in self._cache.match(request.prompt[:-1]):
                self._buffer.write(row, start, piece)
                start += piece[0].shape[-2]
            starts.append(start)
        hidden = self._run_prompts([request.prompt for request in wave], starts, first_row)
        for row, (request, start) in enumerate(zip(wave, starts, strict=True), start=first_row):
            self._rows.append(Row(request, request.prompt.tolist(), start))
            self._remember(row, request.prompt)
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.cached_tokens += start
        self._sample(self._rows[first_row:], hidden)

    def _run_prompts(self, prompts: list[TokenIds], starts: list[int], first_row: int) -> Tensor:
        """[B, hidden] at each prompt's last token; in pieces where the prompts are long."""
        ends_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
        longest = max(len(prompt) - start for prompt, start in zip(prompts, starts, strict=True))
        columns = min(longest, max(1, self._max_prefill_tokens // len(prompts)))
        last_hidden: Tensor | None = None
        for offset in range(0, longest, columns):
            # Padding goes to the slot after the last token, which the first token of the response will take.
            positions_BQ = torch.tensor(starts)[:, None] + offset + torch.arange(min(columns, longest - offset))
            positions_BQ = torch.minimum(positions_BQ, ends_B1)
            ids_BQ = torch.from_numpy(np.stack([
                np.append(prompt, 0)[positions] for prompt, positions in zip(prompts, positions_BQ.numpy(), strict=True)
            ]))  # fmt: skip
            hidden = last_hidden_states(self.model, self._buffer, first_row, ids_BQ, positions_BQ)
            self.stats.forward_passes += 1
            last_hidden = hidden.new_zeros(len(prompts), hidden.shape[-1]) if last_hidden is None else last_hidden
            rows, columns_of_last = (positions_BQ == ends_B1 - 1).nonzero(as_tuple=True)
            last_hidden[rows] = hidden[rows, columns_of_last]
        assert last_hidden is not None
        return last_hidden

    def _decode(self) -> None:
        self._buffer.reserve(len(self._rows), max(len(row.tokens) for row in self._rows))
        positions_B1 = torch.tensor([[len(row.tokens) - 1] for row in self._rows])
        ids_B1 = torch.tensor([[row.tokens[-1]] for row in self._rows])
        hidden = last_hidden_states(self.model, self._buffer, 0, ids_B1, positions_B1)
        self.stats.forward_passes += 1
        self._sample(self._rows, hidden[:, 0])

    def _sample(self, rows: Sequence[Row], hidden: Tensor) -> None:
        """Append a token to each row. ``hidden``: [B, hidden]."""
        logits_BV = self.model.get_output_embeddings()(hidden)
        uniforms = [0.0 if row.request.params.is_greedy else row.request.noise.next() for row in rows]
        tokens, log_probs = sample_tokens(logits_BV, [row.request.params for row in rows], uniforms)
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if not math.isfinite(log_prob):
                raise RolloutError(
                    f"the model's logits are not finite after {len(row.tokens)} tokens: log-prob {log_prob}"
                )
            row.tokens.append(token)
            row.log_probs.append(log_prob)
        self.stats.generated_tokens += len(rows)

    def _collect(self) -> dict[int, Generation]:
        """Take out the rows that have ended; the last row moves into the gap, so that rows stay without gaps."""
        finished: dict[int, Generation] = {}
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            reason = self._stop_reason(row)
            if reason is None:
                continue
            self._remember(index, np.asarray(row.tokens[:-1], dtype=np.int64))
            finished[row.request.handle] = self._finish(index, reason)
            last = self._rows.pop()
            if last is not row:
                self._buffer.move(len(self._rows), index, len(last.tokens) - 1)
                self._rows[index] = last
        return finished

    def _stop_reason(self, row: Row) -> str | None:
        params, token = row.request.params, row.tokens[-1]
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return STOP
        is_full = len(row.tokens) >= self.max_model_len
        return LENGTH if is_full or len(row.log_probs) >= params.max_tokens else None

    def _remember(self, row: int, ids: TokenIds) -> None:
        if self._cache.max_bytes:
            read = self._buffer.read
            self._cache.insert(ids, lambda start, end: read(row, start, end), self._buffer.bytes_per_token)

    def _finish(self, index: int, reason: str) -> Generation:
        row = self._rows[index]
        experts = self._buffer.routes(index, len(row.tokens) - 1)
        return Generation(row.response, row.log_probs, reason, row.num_cached, experts)
