"""The Ray actor of a replica: veRL's agent loops send it requests, the trainer's workers send it weights.

``Generator.step`` and the loading of weights run in a thread; everything else on the actor's event loop, and what
touches the generator there between two steps only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import TokenOutput

from psrl.errors import PSRLError, RolloutError, UnsupportedError
from psrl.rollout.generator import Generator
from psrl.rollout.kv_buffer import load_model
from psrl.rollout.requests import ABORTED, Generation
from psrl.rollout.sampling import SamplingParams
from psrl.rollout.settings import dtype_of, read_settings
from psrl.threads import run_blocking

logger = logging.getLogger(__name__)
_PAUSED, _UPDATING = "paused", "updating"


class _Submission(NamedTuple):
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    future: asyncio.Future[Generation]


class HFServer:
    """One model in one process. Made a Ray actor by the replica.

    Requests that arrive while it is paused (``abort_all_requests``) or its weights are replaced wait. A response never
    mixes two versions of the weights: an update lets running requests end first.
    """

    def __init__(self, model_path: str, rollout: Any, seed: int) -> None:
        """
        Args:
            rollout: veRL's ``RolloutConfig``.
            seed: with a request's id, its prompt and the version of the weights, what its random numbers derive from
                where the request brings no seed.
        """
        from transformers.utils import logging as hf_logging

        settings = read_settings(rollout)
        hf_logging.disable_progress_bar()
        torch.set_num_threads(settings.num_threads)
        self._rollout = rollout
        model = load_model(copy_to_local(model_path), dtype_of(rollout))
        self._generator = Generator(
            model,
            eos_token_ids=_eos_token_ids(model),
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            max_prefill_tokens=settings.max_prefill_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            record_routes=rollout.enable_rollout_routing_replay,
            seed=seed,
        )
        self._global_steps = 0
        self._has_weights = rollout.load_format != "dummy"
        self._submissions: list[_Submission] = []
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()
        self._closed_by: set[str] = set()
        self._rejecting = False
        self._gate, self._is_idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._is_idle.set()

    # ------------------------------------------------------------------------------------------------------ requests
    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """Token ids in, token ids out, as veRL's clients call it.

        Raises:
            UnsupportedError: a sampling parameter or modality that is not implemented; names it.
            RolloutError: no weights have arrived although ``load_format=dummy``.
        """
        for name, value in (("image_data", image_data), ("video_data", video_data), ("audio_data", audio_data)):
            if value:
                raise UnsupportedError(f"{name} is not supported by the hf rollout: it generates text from text")
        prompt_ids = list(prompt_ids)
        params = SamplingParams.from_mapping(
            sampling_params, max_tokens=self._default_max_tokens(len(prompt_ids)), ignore_eos=self._rollout.ignore_eos
        )
        while self._closed_by:
            if self._rejecting:
                return self._output(Generation([], [], ABORTED, 0), with_log_probs=False)
            await self._gate.wait()
        if not self._has_weights:
            raise RolloutError("load_format=dummy and no weights have been loaded yet: update the weights first")
        if params.seed is None:  # another id for every version: or an epoch would repeat the last one's draws
            request_id = f"{self._global_steps}/{request_id}"
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._submissions.append(_Submission(request_id, prompt_ids, params, future))
        self._is_idle.clear()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return self._output(await future, with_log_probs=sampling_params.get("logprobs") not in (None, False))

    def _default_max_tokens(self, num_prompt_tokens: int) -> int:
        """As veRL's vLLM server has it: within the response, and within prompt and response together."""
        config = self._rollout
        room = config.prompt_length + config.response_length - num_prompt_tokens
        return max(1, min(config.response_length, room))

    def _output(self, generation: Generation, with_log_probs: bool) -> TokenOutput:
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs if with_log_probs else None,
            routed_experts=None if generation.experts is None else generation.experts.numpy(),
            stop_reason="aborted" if generation.stop_reason == ABORTED else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps, "num_cached_tokens": generation.num_cached_tokens},
        )

    async def _drive(self) -> None:
        """Step the generator until nothing is left to do. An error in it is the answer to every open request."""
        try:
            while self._submissions or not self._generator.is_idle:
                async with self._between_steps:
                    self._submit_all()
                    self._resolve(await run_blocking(self._generator.step))
        except Exception as error:  # of the model: nobody awaits this task, so it goes to those who wait for answers
            logger.exception("generation failed")
            self._submit_all()
            self._generator.abort_all()
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(error)
            self._futures.clear()
        finally:
            self._is_idle.set()

    def _submit_all(self) -> None:
        submissions, self._submissions = self._submissions, []
        for request_id, prompt_ids, params, future in submissions:
            if future.done():
                continue
            try:
                self._futures[self._generator.submit(request_id, prompt_ids, params)] = future
            except PSRLError as error:  # the request's own fault, so its own answer
                future.set_exception(error)

    def _resolve(self, finished: dict[int, Generation]) -> None:
        for handle, generation in finished.items():
            future = self._futures.pop(handle)
            if not future.done():
                future.set_result(generation)

    # ------------------------------------------------------------------------------------------------------- control
    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End running requests with what they have, and hold later ones until ``resume_generation``.

        Args:
            reject_request: answer later ones (those already waiting too) as aborted instead.
        """
        self._close(_PAUSED)
        self._rejecting = reject_request
        if reject_request:
            self._gate.set()  # those that wait look again
            self._gate.clear()
        async with self._between_steps:
            self._submit_all()
            aborted = self._generator.abort_all()
            self._resolve(aborted)
        return {"aborted_count": len(aborted), "request_ids": []}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._open(_PAUSED)

    async def clear_kv_cache(self) -> None:
        """Forget all prefixes; with nothing running, give the memory of K/V back."""
        async with self._between_steps:
            self._generator.clear_cache()

    async def release_kv_cache(self) -> None:
        await self.clear_kv_cache()

    async def sleep(self) -> None:
        """Give the memory of K/V back, once nothing runs. The weights stay: they are in host memory."""
        await self._is_idle.wait()
        await self.clear_kv_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to do: K/V memory comes back on demand."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do: K/V memory comes back on demand."""

    async def start_profile(self, **_: Any) -> None:
        logger.warning("the hf rollout has no profiler: its steps are not in the profile")

    async def stop_profile(self) -> None:
        """Nothing to do: there is no profile."""

    async def stats(self) -> dict[str, int]:
        """Counters of ``GeneratorStats``, and bytes of kept prefixes."""
        return {**vars(self._generator.stats), "cached_bytes": self._generator.cached_bytes}

    # ------------------------------------------------------------------------------------------------------- weights
    async def begin_update(self) -> None:
        """Hold new requests, let running ones end, forget all prefixes."""
        self._close(_UPDATING)
        await self._is_idle.wait()
        self._generator.begin_update()

    async def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        """A part of the weights, by transformers' names.

        Raises:
            RolloutError: as ``WeightUpdate.load``. From then on requests are refused, until a whole update succeeds.
        """
        try:
            await run_blocking(lambda: self._generator.load_weights(tensors))
        except RolloutError:
            self._open(_UPDATING)
            raise

    async def finish_update(self, global_steps: int | None) -> int:
        """Answer requests with the new weights; returns the number of tensors.

        Args:
            global_steps: their version, which responses carry. None leaves it.

        Raises:
            RolloutError: as ``WeightUpdate.finish``.
        """
        try:
            num_tensors = self._generator.finish_update()
            self._has_weights = True
            if global_steps is not None:
                self._global_steps = int(global_steps)
        finally:
            self._open(_UPDATING)
        return num_tensors

    def _close(self, reason: str) -> None:
        self._closed_by.add(reason)
        self._gate.clear()

    def _open(self, reason: str) -> None:
        self._closed_by.discard(reason)
        if not self._closed_by:
            self._gate.set()


def _eos_token_ids(model: Any) -> list[int]:
    """Of the generation configuration and of the model's."""
    found: list[int] = []
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return sorted(set(found))
