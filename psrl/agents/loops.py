"""veRL's agent loop over an environment: ``configs/agents.yaml`` names one for each environment.

One call of ``run`` plays one task and returns one ``AgentLoopOutput`` for every sample of the strategy, the last one
last. Hooks: ``verl.experimental.agent_loop.agent_loop.AgentLoopBase``, ``verl.trainer.ppo.v1.agent_loop_tq``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from psrl.agents.actions import action_format
from psrl.agents.env.base import make_environment
from psrl.agents.episode import Episode, EpisodePlayer, Message, Sampled, state_key
from psrl.agents.parameters import AgentParameters
from psrl.agents.strategies import Ids, Limits, Opening, Sample, make_strategy, path_return, sample_returns
from psrl.errors import InputError
from psrl.threads import run_blocking

T = TypeVar("T")

_FROM_VERL = (
    "trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type",
)  # fmt: skip


@functools.cache
def environment_threads() -> ThreadPoolExecutor:
    """Threads for environments. Not the event loop's own: a slow environment must not hold up veRL's tokenising."""
    return ThreadPoolExecutor(max_workers=max(8, os.cpu_count() or 1), thread_name_prefix="psrl-environment")


async def run_in_thread(call: Callable[[], T]) -> T:
    return await run_blocking(call, environment_threads())


class Draws:
    """Seeds of a session's requests: functions of the session's name and the prompt, and of how often the prompt has
    come up, since branches ask it again. A job that is run again asks the same."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Counter[tuple[int, ...]] = Counter()

    def seed(self, prompt_ids: Sequence[int]) -> int:
        """In [0, 2**63)."""
        prompt = tuple(prompt_ids)
        text = f"{self._name}/{self._asked[prompt]}/{','.join(map(str, prompt))}"
        self._asked[prompt] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class ContinuousFrames:
    """Messages to ids with veRL's Continuous Token builder, which knows each model family's boundaries."""

    def __init__(self, builder: Any, tokenizer: Any) -> None:
        self._builder = builder
        self._tokenizer = tokenizer
        self._messages: list[Message] = []

    def begin(self, messages: list[Message]) -> tuple[Ids, Ids]:
        """Ids of the first messages, and of the header that asks for an answer.

        Raises:
            InputError: the chat template does not add the header at the end.
        """
        self._messages = messages
        with_header = tuple(self._builder.build_initial_tokens(messages))
        head = tuple(self._builder._render_tokens(messages, add_generation_prompt=False))
        if with_header[: len(head)] != head or len(with_header) == len(head):
            raise InputError("the chat template adds no generation prompt after the last message: agents need one")
        return head, with_header[len(head) :]

    def observe(self, text: str, response_ids: Ids) -> Opening:
        """Ids of an observation that follows a response, and what the template changes between the two."""
        updated = [*self._messages, {"role": "user", "content": text}]
        merged = self._builder.merge_context_tokens(self._messages, updated, list(response_ids))
        start = len(response_ids) - merged.removed_prefix_token_count
        added = tuple(merged.token_ids[start:])
        num_inserted = len(merged.inserted_token_ids)
        return Opening(added[num_inserted:], added[:num_inserted], merged.removed_prefix_token_count)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class EnvironmentAgentLoop(AgentLoopBase):
    """Plays an environment and samples it with a strategy.

    Reward: every output has the score of the whole session, the mean over its leaves, because veRL overwrites all with
    the last one's. The return of each sample is in ``extra_fields``:

    - ``psrl_step``: turn of the sample, from 0; of a whole trajectory, its last turn.
    - ``psrl_branch``, ``psrl_parent``: names of the sample's last turn and of the turn before (of a leaf sample: of the
      closest turn after which the tree branches); "" for the task prompt. Unique within a session.
    - ``psrl_return``: of a turn, its reward and the discounted mean return of what follows; of a leaf, the sum of its
      rewards.
    - ``psrl_state``: key of the state the agent was in before the turn; equal states have equal keys.
    - ``psrl_end``: why the episode (of a turn in several: of the first leaf) ended.
    """

    def __init__(self, *args: Any, name: str = "", tools: Any = None, **kwargs: Any) -> None:
        """
        Args:
            args: veRL's, as are the keyword arguments of ``AgentLoopBase``.
            name: of the entry in ``agents.yaml``.
            tools: veRL's; environments need none.
            kwargs: fields of ``AgentParameters``; the job's ``agents`` group overrides them.

        Raises:
            ConfigError: a parameter is unknown or out of range; names it.
        """
        super().__init__(*args, **{key: kwargs.pop(key) for key in _FROM_VERL if key in kwargs})
        values = {key: _plain(value) for key, value in kwargs.items()}
        values |= _plain(self.config.get("agents")) or {}
        self.parameters = AgentParameters.read(values, f"agent loop {name}")
        self.strategy = make_strategy(self.parameters.strategy, window=self.parameters.window)

    # veRL's annotation names one output; its worker takes a list (agent_loop_tq.py, _agent_loop_postprocess).
    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> list[AgentLoopOutput]:
        """Play the task of a dataset row.

        Args:
            kwargs: of the row, ``raw_prompt`` and ``extra_info`` with the ``task`` (``psrl.agents.dataset``) are read;
                ``uid`` and ``session_id`` are what random numbers derive from, where the server takes a seed.

        Raises:
            InputError: the row has no task, or its first prompt is longer than the job allows.
            EnvironmentFault: the environment broke.
        """
        task = read_task(kwargs.get("extra_info"))
        rollout = self.rollout_config
        options = self.parameters.episode_options()
        if task.get("max_turns"):
            options = replace(options, max_turns=min(options.max_turns, task["max_turns"]))
        player = EpisodePlayer(
            strategy=self.strategy,
            frames=ContinuousFrames(self.continuous_token_builder, self.tokenizer),
            action_format=action_format(task.get("action_format") or self.parameters.action_format),
            make_environment=functools.partial(
                make_environment, self.parameters.environment, self.parameters.environment_options
            ),
            sample=self._sampler(sampling_params, self._draws(kwargs)),
            run_blocking=run_in_thread,
            limits=Limits(rollout.prompt_length, rollout.response_length, rollout.get("max_model_len")),
            options=options,
        )
        episode = await player.play(task, list(kwargs["raw_prompt"]))
        return self._outputs(episode)

    def _draws(self, row: Mapping[str, Any]) -> Draws | None:
        """None: the server draws as it likes. The hf rollout takes seeds; others do where the job asks for
        ``full_determinism``, which slows them down."""
        rollout = self.rollout_config
        if "uid" not in row or not (rollout.get("name") == "hf" or rollout.get("full_determinism")):
            return None
        return Draws(f"{rollout.get('seed') or 0}/{row['uid']}/{row.get('session_id', 0)}")

    def _sampler(
        self, sampling_params: dict[str, Any], draws: Draws | None
    ) -> Callable[[list[int], int], Awaitable[Sampled]]:
        # One id for the whole task: veRL sends equal ids to the same server, whose cache holds the shared prefix.
        request_id = uuid4().hex

        async def sample(prompt_ids: list[int], max_tokens: int) -> Sampled:
            seeded = {} if draws is None else {"seed": draws.seed(prompt_ids)}
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling_params={**sampling_params, **seeded, "max_tokens": max_tokens},
            )
            return Sampled(output.token_ids, output.log_probs or None, output)

        return sample

    def _outputs(self, episode: Episode) -> list[AgentLoopOutput]:
        tree = episode.tree
        samples = self.strategy.samples(tree)
        returns = sample_returns(self.strategy, tree, samples, self.parameters.discount)
        leaves = tree.leaves()
        score = sum(path_return(tree, leaf) for leaf in leaves) / len(leaves)
        info = {
            "success": sum(episode.chains[leaf].success for leaf in leaves) / len(leaves),
            "turns": sum(len(episode.chains[leaf].turns) for leaf in leaves) / len(leaves),
            "invalid_actions": sum(played.action is None for played in episode.played) / len(episode.played),
        }
        metrics = AgentLoopMetrics(generate_sequences=episode.generate_seconds, tool_calls=episode.environment_seconds)
        return [
            AgentLoopOutput(
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                response_mask=sample.response_mask,
                response_logprobs=sample.logprobs,
                routed_experts=episode.played[sample.node].sampled.raw.routed_experts,
                reward_score=score,
                num_turns=2 * (sample.step + 1),
                metrics=metrics,
                extra_fields={**self._extra_fields(episode, sample, value), "reward_extra_info": dict(info)},
            )
            for sample, value in zip(samples, returns, strict=True)
        ]

    def _extra_fields(self, episode: Episode, sample: Sample, value: float) -> dict[str, Any]:
        tree, node = episode.tree, sample.node
        parent = tree.parents[node] if self.strategy.per_turn else tree.fork(node)
        first_leaf = next(leaf for leaf in tree.leaves() if node in tree.path(leaf))
        versions = [episode.played[i].sampled.raw.extra_fields for i in sample.trained]
        oldest = [fields["min_global_steps"] for fields in versions if fields.get("min_global_steps") is not None]
        newest = [fields["max_global_steps"] for fields in versions if fields.get("max_global_steps") is not None]
        return {
            "min_global_steps": min(oldest, default=None),
            "max_global_steps": max(newest, default=None),
            "psrl_step": sample.step,
            "psrl_branch": f"turn{node}",
            "psrl_parent": f"turn{parent}" if parent >= 0 else "",
            "psrl_return": float(value),
            "psrl_state": state_key(episode.played[node].shown),
            "psrl_end": episode.chains[first_leaf].end_reason,
        }


def read_task(extra_info: Any) -> Mapping[str, Any]:
    """The task of a dataset row: an object, or its JSON text (all environments' rows then have one schema).

    Raises:
        InputError: there is none.
    """
    task = extra_info.get("task") if isinstance(extra_info, Mapping) else None
    if isinstance(task, str):
        try:
            task = json.loads(task)
        except ValueError as error:
            raise InputError(f"extra_info.task is not JSON: {task[:80]!r}") from error
    if not isinstance(task, Mapping):
        raise InputError("the dataset row has no extra_info.task: python -m psrl.agents.dataset writes rows that do")
    return task


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
