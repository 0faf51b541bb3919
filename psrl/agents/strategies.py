"""Sampling strategies: how the turns of an agent become the samples it is trained on. No torch, no tokenizer.

Every turn is tokenised once and its ids are kept: a history is put together from ids, sampled tokens included, so the
prompt of a step is token for token a prefix of the next step's (except under ``step_window``, whose history slides).

- ``linear``: one sample a trajectory. Prompt: the first turn's; response: all that follows, observations masked.
- ``step``: one sample a turn. Prompt: the full history; response: what was sampled in that turn.
- ``step_window``: the same, but the history is the task prompt and the last ``window`` turns.
- ``step_no_think``: the same as ``step``, but the history holds earlier responses without their thoughts.
- ``tree``: branches leave the trajectory at chosen turns; one sample a leaf, as in ``linear``.
- ``tree_step``: the same branches; one sample a turn, each turn once, as in ``step``.

An agent is sampled with the prompt that its strategy trains on: ``Strategy.prompt`` serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psrl.errors import ConfigError

STRATEGIES = ("linear", "step", "step_window", "step_no_think", "tree", "tree_step")

Ids = tuple[int, ...]


class Opening(NamedTuple):
    """What precedes a response: the observation, ended by the tokens that ask for an answer."""

    observation_ids: Ids
    boundary_ids: Ids = ()
    """Tokens with which the chat template closes the response before; absent where that response is."""
    num_trimmed: int = 0
    """Trailing tokens of the response before that the template drops from histories (a stop token that is also the
    first token of the next message)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An observation and the response sampled for it."""

    opening: Opening
    response_ids: Ids
    logprobs: tuple[float, ...] | None = None
    """Of the response tokens, by the policy that sampled them."""
    thought: tuple[int, int] = (0, 0)
    """Half-open span of the response tokens that are thought, not action."""

    def __post_init__(self) -> None:
        start, end = self.thought
        if not 0 <= start <= end <= len(self.response_ids):
            raise ValueError(f"thought span {self.thought} is outside a response of {len(self.response_ids)} tokens")
        if self.logprobs is not None and len(self.logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.logprobs)} log-probs for {len(self.response_ids)} response tokens")


@dataclass(slots=True)
class TurnTree:
    """Turns of one task in a tree; a trajectory without branches is a chain. Parents come before their children."""

    head_ids: Ids
    """System and task prompt: precedes the first turn and is in every history."""
    turns: list[Turn] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Index of the turn before, -1 at the first."""
    rewards: list[float] = field(default_factory=list)
    """What the action of each turn earned."""

    def add(self, turn: Turn, parent: int, reward: float = 0.0) -> int:
        """Append a turn and return its index."""
        if not -1 <= parent < len(self.turns):
            raise ValueError(f"parent {parent} is not an earlier turn of {len(self.turns)}")
        self.turns.append(turn)
        self.parents.append(parent)
        self.rewards.append(reward)
        return len(self.turns) - 1

    def path(self, node: int) -> list[int]:
        """Turns from the first down to and including ``node``."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def leaves(self) -> list[int]:
        inner = set(self.parents)
        return [node for node in range(len(self.turns)) if node not in inner]

    def fork(self, leaf: int) -> int:
        """The closest ancestor of a leaf below which the tree branches, -1 where there is none.

        -1 also stands for the task prompt, from which branches of the first turn leave.
        """
        node = self.parents[leaf]
        while node >= 0 and len(self.children(node)) == 1:
            node = self.parents[node]
        return node


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of training data. The mask is 1 on sampled tokens, 0 on observations; log-probs are 0 there."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float] | None
    node: int
    """Last turn in it, an index into the tree."""
    step: int
    """Number of turns before that one."""
    trained: list[int]
    """Turns whose responses are targets."""


class Limits(NamedTuple):
    """Tokens that the rows of a job may have."""

    prompt_length: int
    response_length: int
    model_length: int | None = None
    """Prompt and response together."""


class Room(NamedTuple):
    """How many tokens the next response may have, and which limit leaves none where it is 0."""

    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """How histories look and what becomes a sample. Make it with ``make_strategy``."""

    name: str
    per_turn: bool
    """One sample a turn, else one a leaf."""
    branches: bool
    window: int | None = None
    drop_thoughts: bool = False

    def prompt(self, head_ids: Ids, past: Sequence[Turn], opening: Opening) -> list[int]:
        """Ids from which the next response is sampled.

        Args:
            past: the turns before, first to last.
            opening: of the turn whose response is wanted.
        """
        kept = past if self.window is None else past[max(0, len(past) - self.window) :]
        openings = [*(turn.opening for turn in kept), opening]
        ids = [*head_ids]
        for i, turn in enumerate(kept):
            # The response that the first boundary would close is not in the history.
            ids += (*turn.opening.boundary_ids, *turn.opening.observation_ids) if i else turn.opening.observation_ids
            ids += self._remembered(turn, openings[i + 1].num_trimmed)
        if kept:
            ids += opening.boundary_ids
        return [*ids, *opening.observation_ids]

    def _remembered(self, turn: Turn, num_trimmed: int) -> Ids:
        end = len(turn.response_ids) - num_trimmed
        if not self.drop_thoughts:
            return turn.response_ids[:end]
        start, stop = turn.thought
        return turn.response_ids[: min(start, end)] + turn.response_ids[stop:end]

    def room(self, head_ids: Ids, past: Sequence[Turn], opening: Opening, limits: Limits) -> Room:
        """Tokens that the next response may have for every row to stay within ``limits``."""
        length = len(self.prompt(head_ids, past, opening))
        prompt_length, used = length, 0
        if not self.per_turn and past:
            prompt_length = len(self.prompt(head_ids, (), past[0].opening))
            used = length - prompt_length
        rooms = [Room(limits.response_length - used, "response_length")]
        if limits.model_length is not None:
            rooms.append(Room(limits.model_length - length, "model_length"))
        if prompt_length > limits.prompt_length:
            rooms.append(Room(0, "prompt_length"))
        room = min(rooms, key=lambda room: room.num_tokens)
        return Room(max(0, room.num_tokens), room.reason)

    def samples(self, tree: TurnTree) -> list[Sample]:
        """The samples of a task, in the order of their last turns."""
        if self.per_turn:
            return [self._step_sample(tree, node) for node in range(len(tree.turns))]
        return [self._leaf_sample(tree, leaf) for leaf in tree.leaves()]

    def _step_sample(self, tree: TurnTree, node: int) -> Sample:
        *past, turn = [tree.turns[i] for i in tree.path(node)]
        return Sample(
            prompt_ids=self.prompt(tree.head_ids, past, turn.opening),
            response_ids=[*turn.response_ids],
            response_mask=[1] * len(turn.response_ids),
            logprobs=None if turn.logprobs is None else [*turn.logprobs],
            node=node,
            step=len(past),
            trained=[node],
        )

    def _leaf_sample(self, tree: TurnTree, leaf: int) -> Sample:
        path = tree.path(leaf)
        turns = [tree.turns[i] for i in path]
        ids, mask = [*turns[0].response_ids], [1] * len(turns[0].response_ids)
        logprobs: list[float] = [*(turns[0].logprobs or ())]
        for turn in turns[1:]:
            opening = turn.opening
            kept = len(ids) - opening.num_trimmed
            del ids[kept:], mask[kept:], logprobs[kept:]
            context = (*opening.boundary_ids, *opening.observation_ids)
            ids += (*context, *turn.response_ids)
            mask += [0] * len(context) + [1] * len(turn.response_ids)
            logprobs += [0.0] * len(context) + [*(turn.logprobs or ())]
        return Sample(
            prompt_ids=self.prompt(tree.head_ids, (), turns[0].opening),
            response_ids=ids,
            response_mask=mask,
            logprobs=None if any(turn.logprobs is None for turn in turns) else logprobs,
            node=leaf,
            step=len(path) - 1,
            trained=path,
        )


def make_strategy(name: str, *, window: int | None = None) -> Strategy:
    """The strategy of that name.

    Raises:
        ConfigError: there is none, or ``window`` is missing, below 1, or given to a strategy without one.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    if name == "step_window":
        if window is None or window < 1:
            raise ConfigError(f"strategy step_window needs window, turns of history >= 1, got {window}")
    elif window is not None:
        raise ConfigError(f"window is for the strategy step_window, but the strategy is {name}: leave window null")
    return Strategy(
        name=name,
        per_turn=name not in ("linear", "tree"),
        branches=name in ("tree", "tree_step"),
        window=window,
        drop_thoughts=name == "step_no_think",
    )


def turn_returns(tree: TurnTree, discount: float = 1.0) -> list[float]:
    """Return of every turn: its reward and the discounted mean of its children's returns."""
    returns = list(tree.rewards)
    children: list[list[float]] = [[] for _ in tree.turns]
    for node in range(len(tree.turns) - 1, -1, -1):  # children come after their parents
        if children[node]:
            returns[node] += discount * sum(children[node]) / len(children[node])
        if tree.parents[node] >= 0:
            children[tree.parents[node]].append(returns[node])
    return returns


def path_return(tree: TurnTree, leaf: int) -> float:
    """Sum of the rewards from the first turn to ``leaf``."""
    return float(sum(tree.rewards[node] for node in tree.path(leaf)))


def sample_returns(strategy: Strategy, tree: TurnTree, samples: Sequence[Sample], discount: float = 1.0) -> list[float]:
    """The return that each sample is to be credited with.

    A sample of one turn has that turn's discounted return; a sample of a whole path has the sum of its rewards.
    """
    if strategy.per_turn:
        returns = turn_returns(tree, discount)
        return [returns[sample.node] for sample in samples]
    return [path_return(tree, sample.node) for sample in samples]
