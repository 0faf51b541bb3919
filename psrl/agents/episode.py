"""Plays one task: an agent that is sampled turn by turn in an environment, with branches where the strategy has them.

Knows neither veRL nor a model: what samples tokens and what frames messages are passed in.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from psrl.agents.actions import ActionFormat, token_span
from psrl.agents.env.base import Environment, EnvironmentFault, Observation
from psrl.agents.strategies import Ids, Limits, Opening, Strategy, Turn, TurnTree
from psrl.errors import ConfigError, InputError

INVALID_ACTION = "That is not one of the commands."

T = TypeVar("T")
Message = dict[str, Any]


class Sampled(NamedTuple):
    """Tokens that a policy sampled for a prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    raw: Any = None
    """What the server returned, for whoever knows it."""


class Frames(Protocol):
    """Turns messages into token ids, each message once."""

    def begin(self, messages: list[Message]) -> tuple[Ids, Ids]:
        """Ids of the first messages, and of the header that asks for an answer."""
        ...

    def observe(self, text: str, response_ids: Ids) -> Opening:
        """Ids of an observation that follows a response."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How long episodes are, how actions are read, where branches leave."""

    max_turns: int = 16
    """Of an episode. A dataset row may name fewer; the job's prompt and response length always hold."""
    max_turn_tokens: int | None = None
    """Tokens of a response at most. None: as many as the response length leaves."""
    branch_turns: tuple[int, ...] = ()
    """Turns, from 0, that are sampled again (``tree``, ``tree_step`` only)."""
    num_branches: int = 0
    """How often each of them is sampled again."""
    invalid_action_penalty: float = 0.0
    """Taken off the reward of a turn without an admissible action."""
    turn_penalty: float = 0.0
    """Taken off the reward of every turn."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("num_branches", "invalid_action_penalty", "turn_penalty"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if any(turn < 0 for turn in self.branch_turns) or len(set(self.branch_turns)) < len(self.branch_turns):
            raise ConfigError(f"branch_turns must be different turns from 0, got {list(self.branch_turns)}")


@dataclass(slots=True)
class PlayedTurn:
    """A turn, and what came of it in the environment."""

    turn: Turn
    shown: Observation
    """What the agent saw before it answered."""
    action: str | None
    reward: float
    sampled: Sampled


@dataclass(slots=True)
class Chain:
    """Turns from the first on; of a branch, those of the trunk included."""

    turns: list[PlayedTurn]
    end_reason: str = ""
    """``done``, ``max_turns``, ``empty_response``, or the limit that left no room for another response:
    ``prompt_length``, ``response_length``, ``model_length``."""
    success: bool = False


@dataclass(slots=True)
class Episode:
    """All turns of a task; index i of ``played`` is turn i of ``tree``."""

    tree: TurnTree
    played: list[PlayedTurn]
    chains: dict[int, Chain]
    """By the leaf that ends it."""
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0


def state_key(observation: Observation) -> str:
    """Equal for equal observations and choices: which steps of different trajectories were taken in the same state."""
    text = "\n".join([observation.text, *(observation.admissible or ())])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class EpisodePlayer:
    """Plays one task. Make a new one for every task."""

    strategy: Strategy
    frames: Frames
    action_format: ActionFormat
    make_environment: Callable[[], Environment]
    sample: Callable[[list[int], int], Awaitable[Sampled]]
    """(prompt ids, most tokens) -> sampled tokens."""
    run_blocking: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Runs an environment's call where it does not hold up the event loop."""
    limits: Limits
    options: EpisodeOptions
    _head_ids: Ids = ()
    _seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "environment": 0.0})

    async def play(self, task: Mapping[str, Any], messages: Sequence[Message]) -> Episode:
        """Play the trunk, then all branches at once.

        Args:
            task: the environment's part of the dataset row.
            messages: system prompt and, if any, task prompt. The first observation is appended to the last message if
                that is the user's, else follows as the user's.

        Raises:
            InputError: the first prompt is already longer than a limit.
            EnvironmentFault: the environment broke, or does not repeat itself.
        """
        branch_turns = self.options.branch_turns if self.strategy.branches else ()
        environment = await self._call(self.make_environment)
        snapshots: dict[int, Environment] = {}
        try:
            shown = await self._call(lambda: environment.reset(task))
            self._head_ids, header_ids = self.frames.begin(_first_messages(messages, self.action_format.render(shown)))
            trunk = Chain([])
            await self._go_on(trunk, environment, shown, Opening(header_ids), branch_turns, snapshots)
            branches = await self._branches(trunk, task, branch_turns, snapshots)
        finally:
            for held in (environment, *snapshots.values()):
                await self._call(held.close)
        return self._assemble([trunk, *branches])

    async def _branches(
        self, trunk: Chain, task: Mapping[str, Any], branch_turns: Sequence[int], snapshots: dict[int, Environment]
    ) -> list[Chain]:
        jobs = [
            asyncio.ensure_future(self._branch(trunk, turn, task, snapshots.get(turn)))
            for turn in branch_turns
            if turn < len(trunk.turns)
            for _ in range(self.options.num_branches)
        ]
        try:
            return list(await asyncio.gather(*jobs))
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise

    async def _branch(self, trunk: Chain, turn: int, task: Mapping[str, Any], snapshot: Environment | None) -> Chain:
        shared = trunk.turns[:turn]
        environment = await self._call(snapshot.copy if snapshot is not None else self.make_environment)
        try:
            shown = trunk.turns[turn].shown
            if snapshot is None:
                shown = await self._call(lambda: self._replay(environment, task, shared, shown))
            chain = Chain([*shared])
            await self._go_on(chain, environment, shown, trunk.turns[turn].turn.opening, (), {})
        finally:
            await self._call(environment.close)
        return chain

    def _replay(
        self, environment: Environment, task: Mapping[str, Any], shared: Sequence[PlayedTurn], wanted: Observation
    ) -> Observation:
        shown = environment.reset(task)
        for played in shared:
            if played.action is not None:
                shown = environment.step(played.action)
        if shared and shared[-1].action is None:
            shown = shown._replace(text=INVALID_ACTION)
        if (shown.text, shown.admissible) != (wanted.text, wanted.admissible):
            raise EnvironmentFault(
                f"a branch cannot be made: the same actions led to another state: {shown.text!r}, not {wanted.text!r}"
            )
        return wanted

    async def _go_on(
        self,
        chain: Chain,
        environment: Environment,
        shown: Observation,
        opening: Opening,
        branch_turns: Sequence[int],
        snapshots: dict[int, Environment],
    ) -> None:
        """Append turns to ``chain`` until the episode ends; store copies for branches in ``snapshots``."""
        while not chain.end_reason:
            past = [played.turn for played in chain.turns]
            if len(past) in branch_turns and environment.supports_copy:
                snapshots[len(past)] = await self._call(environment.copy)
            room = self.strategy.room(self._head_ids, past, opening, self.limits)
            if room.num_tokens == 0:
                chain.end_reason = room.reason
                break
            sampled = await self._sample(past, opening, room.num_tokens)
            if not sampled.token_ids:
                chain.end_reason = "empty_response"
                break
            played, shown = await self._take_turn(environment, shown, opening, sampled)
            chain.turns.append(played)
            if shown.done:
                chain.end_reason, chain.success = "done", shown.success
            elif len(chain.turns) == self.options.max_turns:
                chain.end_reason = "max_turns"
            else:
                opening = self.frames.observe(self.action_format.render(shown), played.turn.response_ids)
        if not chain.turns:
            length = len(self.strategy.prompt(self._head_ids, (), opening))
            raise InputError(
                f"no turn could be played ({chain.end_reason}): the first prompt has {length} tokens, the limits are "
                f"prompt_length {self.limits.prompt_length}, response_length {self.limits.response_length}, "
                f"max_model_len {self.limits.model_length}: raise data.max_prompt_length or shorten the prompt"
            )

    async def _sample(self, past: Sequence[Turn], opening: Opening, room: int) -> Sampled:
        start = time.perf_counter()
        prompt = self.strategy.prompt(self._head_ids, past, opening)
        sampled = await self.sample(prompt, min(room, self.options.max_turn_tokens or room))
        self._seconds["generate"] += time.perf_counter() - start
        if len(sampled.token_ids) > room:
            raise InputError(f"the rollout sampled {len(sampled.token_ids)} tokens where {room} were allowed")
        return sampled

    async def _take_turn(
        self, environment: Environment, shown: Observation, opening: Opening, sampled: Sampled
    ) -> tuple[PlayedTurn, Observation]:
        ids = tuple(sampled.token_ids)
        reply = self.action_format.read(self.frames.decode(ids), shown)
        turn = Turn(
            opening=opening,
            response_ids=ids,
            logprobs=None if sampled.logprobs is None else tuple(sampled.logprobs),
            thought=token_span(ids, self.frames.decode, reply.thought),
        )
        reward = -self.options.turn_penalty
        if reply.action is None:
            after = shown._replace(text=INVALID_ACTION, reward=0.0)
            reward -= self.options.invalid_action_penalty
        else:
            action = reply.action
            after = await self._call(lambda: environment.step(action))
        return PlayedTurn(turn, shown, reply.action, reward + after.reward, sampled), after

    async def _call(self, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        try:
            return await self.run_blocking(call)
        finally:
            self._seconds["environment"] += time.perf_counter() - start

    def _assemble(self, chains: Sequence[Chain]) -> Episode:
        """The chains as one tree. Turns that branches share with the trunk are the same objects, and enter once."""
        tree = TurnTree(self._head_ids)
        played: list[PlayedTurn] = []
        node_of: dict[int, int] = {}
        by_leaf: dict[int, Chain] = {}
        for chain in chains:
            parent = -1
            for turn in chain.turns:
                if id(turn) not in node_of:
                    node_of[id(turn)] = tree.add(turn.turn, parent, turn.reward)
                    played.append(turn)
                parent = node_of[id(turn)]
            by_leaf[parent] = chain
        return Episode(tree, played, by_leaf, self._seconds["generate"], self._seconds["environment"])


def _first_messages(messages: Sequence[Message], observation: str) -> list[Message]:
    copied = [dict(message) for message in messages]
    if copied and copied[-1]["role"] == "user":
        copied[-1]["content"] = f"{copied[-1]['content']}\n\n{observation}"
        return copied
    return [*copied, {"role": "user", "content": observation}]
