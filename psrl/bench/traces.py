"""Samples of recorded conversations under every sampling strategy, and made-up ones of a chosen length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from psrl.agents.strategies import Opening, Turn, TurnTree, make_strategy
from psrl.data import ReplaySample
from psrl.data.chat import ChatConverter
from psrl.data.rows import Row, read_rows
from psrl.data.tokenizer import ChatTokenizer
from psrl.errors import InputError

_ACTIONS = ("Action:", "<tool_call>", "```")
"""Where the thought of a response ends."""


class Trace(NamedTuple):
    """The tasks of one file."""

    name: str
    tasks: dict[str, TurnTree]
    branches: bool
    """Whether its rows branch off each other."""

    def fits(self, strategy: str) -> bool:
        return make_strategy(strategy, window=1 if strategy == "step_window" else None).branches == self.branches


def read_trace(path: Path, tokenizer: ChatTokenizer, limit: int | None, num_turns: int | None) -> Trace:
    """Rows of one task that branch off each other become one tree of turns; other rows are tasks of their own.

    Args:
        limit: rows to read.
        num_turns: turns of each row to keep.

    Raises:
        InputError: the file holds something else than conversations, or no assistant message.
    """
    converter = ChatConverter(tokenizer)
    tasks: dict[str, TurnTree] = {}
    branches = False
    for number, row in enumerate(islice(read_rows(path), limit)):
        if "messages" not in row.values:
            raise InputError(f"{row.where}: strategies need conversations (messages), not token samples")
        head, turns = _turns(converter, row, tokenizer)
        branches = branches or "branch_turn" in row.values
        task = f"{row.values.get('task')}" if "branch_turn" in row.values else f"{row.values.get('task')}#{number}"
        _grow(tasks.setdefault(task, TurnTree(head)), islice(turns, num_turns))
    tasks = {name: tree for name, tree in tasks.items() if tree.turns}
    if not tasks:
        raise InputError(f"{path}: no assistant message in the rows that were read")
    return Trace(path.name.removesuffix(".gz").removesuffix(".jsonl"), tasks, branches)


def _turns(converter: ChatConverter, row: Row, tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], Iterator[Turn]]:
    """The tokens before the first answer, and the turns."""
    messages = list(converter.messages(row))
    texts = [str(message["content"]) for message in row.values["messages"]]
    first = next((i for i, message in enumerate(messages) if message.is_response), len(messages))
    head = tuple(x for m in messages[:first] for x in (*m.header, *m.body, *m.footer))

    def turns() -> Iterator[Turn]:
        seen: list[int] = []
        boundary: tuple[int, ...] = ()
        for message, text in zip(messages[first:], texts[first:], strict=True):
            if not message.is_response:
                seen += (*message.header, *message.body, *message.footer)
                continue
            opening = Opening((*seen, *message.header), boundary)
            yield Turn(opening, tuple(message.body), thought=(0, _thought_tokens(text, message.body, tokenizer)))
            seen, boundary = [], tuple(message.footer)

    return head, turns()


def _thought_tokens(text: str, body: Sequence[int], tokenizer: ChatTokenizer) -> int:
    """Leading tokens of a response that are thought: what precedes its action, or all of a ``think[...]``."""
    found = [at for at in (text.find(mark) for mark in _ACTIONS) if at >= 0]
    if text.strip().startswith("think["):
        found = [len(text)]
    ids = tokenizer.encode(text[: min(found, default=0)])
    same = [a == b for a, b in zip(ids, body, strict=False)]
    return same.index(False) if False in same else len(same)


def _grow(tree: TurnTree, turns: Iterator[Turn]) -> None:
    """Follow the tree as long as turns are equal, then branch off."""
    parent = -1
    for turn in turns:
        same = [node for node in tree.children(parent) if tree.turns[node] == turn]
        parent = same[0] if same else tree.add(turn, parent)


def samples_of(trace: Trace, strategy: str, window: int) -> list[ReplaySample]:
    """The samples on which an agent would be trained with that strategy."""
    chosen = make_strategy(strategy, window=window if strategy == "step_window" else None)
    return [
        _sample(f"{trace.name} {task} turn {sample.step + 1}", sample.prompt_ids, sample.response_ids,
                sample.response_mask, task, sample.step)
        for task, tree in trace.tasks.items()
        for sample in chosen.samples(tree)
    ]  # fmt: skip


def made_up_samples(factor: int, seed: int, *, num_groups: int = 2, num_steps: int = 6) -> list[ReplaySample]:
    """Step-wise samples whose turns are ``factor`` times as long: of 8 answered and 24 observed tokens at 1."""
    rnd = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rnd.randrange(4, 256) for _ in range(count)]

    samples: list[ReplaySample] = []
    for group in range(num_groups):
        history = draw(64 * factor)
        for step in range(num_steps):
            answer = draw(8 * factor)
            samples.append(_sample(f"step {step}", history, answer, [1] * len(answer), f"group{group}", step))
            history = [*history, *answer, *draw(24 * factor)]
    return samples


def _sample(
    where: str, prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], uid: str, step: int
) -> ReplaySample:
    loss_mask = np.asarray([0] * len(prompt) + [*mask], dtype=np.bool_)
    return ReplaySample(
        where=where,
        input_ids_N=np.asarray([*prompt, *response], dtype=np.int64),
        loss_mask_N=loss_mask,
        position_ids_N=np.arange(len(loss_mask)),
        advantages_M=np.ones(int(loss_mask.sum())),
        old_log_probs_M=None,
        uid=uid,
        session=uid,
        index=step,
    )
