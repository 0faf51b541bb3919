"""Real agent traces in a few seconds: TextWorld games, made on the spot and played by an oracle that sometimes errs.

``python -m psrl.agents.textworld_traces --out DIR`` writes two files of chat rows, one JSON object a line:

- ``textworld_step.jsonl.gz``: several independent episodes of each game,
  ``{"task", "trial", "reward", "policy", "messages": [{"role", "content"}, …]}``;
- ``textworld_tree.jsonl.gz``: a trunk episode and branches that leave it, or one another, at chosen turns; rows also
  have ``parent`` (trial, null for the trunk) and ``branch_turn`` (actions shared with the parent).

The same options always give the same rows. Needs the ``textworld`` extra.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from psrl.agents.games import GameSpec, TurnState, commands_line, game_text, make_game, read_state, start_game

SYSTEM_PROMPT = (
    "You play a text game. Reply with one short thought and then exactly one command on a line that starts with "
    "'Action:'."
)
POLICY_NAME = "textworld oracle, random action with probability {epsilon:g}"

Message = dict[str, str]


Policy = Callable[[TurnState, Collection[str]], str]
"""(state, commands it must not choose) -> command."""


class Episode(NamedTuple):
    messages: list[Message]
    actions: list[str]
    reward: float
    """1 if the quest was completed, else 0."""


def oracle_with_errors(rng: random.Random, epsilon: float) -> Policy:
    """The oracle's next command, or with probability ``epsilon`` any admissible one."""

    def policy(state: TurnState, forbidden: Collection[str]) -> str:
        oracle = state.oracle_commands[:1] if rng.random() >= epsilon else []
        allowed = [command for command in oracle if command not in forbidden]
        # A branch may forbid the oracle's command, and in theory all others: every game takes "look".
        allowed = allowed or [command for command in state.commands if command not in forbidden] or ["look"]
        return rng.choice(allowed)

    return policy


def observation(state: TurnState, *, first: bool = False) -> str:
    """The game's text without title banner, prompt and status line, and the commands it would accept."""
    return "\n".join([game_text(state, first=first), commands_line(state.commands)])


class TextWorldPlayer:
    """Plays episodes of one game. ``close`` it, or use it as a context manager."""

    def __init__(self, game_file: Path, max_turns: int):
        self.env = start_game(game_file)
        self.max_turns = max_turns

    def __enter__(self) -> TextWorldPlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.env.close()

    def play(self, policy: Policy, prefix: Sequence[str] = (), forbidden: Collection[str] = ()) -> Episode:
        """Play from the start: first the actions of ``prefix``, then the policy's.

        ``forbidden`` holds for the first action after the prefix. The last message is the last action: what the game
        answers to it teaches nobody.
        """
        state = read_state(self.env.reset())
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        actions: list[str] = []
        done = False
        while not done and len(actions) < self.max_turns:
            messages.append({"role": "user", "content": observation(state, first=not actions)})
            turn = len(actions)
            action = prefix[turn] if turn < len(prefix) else policy(state, forbidden if turn == len(prefix) else ())
            messages.append({"role": "assistant", "content": f"I try this next.\nAction: {action}"})
            actions.append(action)
            game_state, _, done = self.env.step(action)
            state = read_state(game_state)
        return Episode(messages, actions, float(state.won))


def step_rows(player: TextWorldPlayer, task: str, num_trials: int, epsilon: float, seed: int) -> list[dict[str, Any]]:
    """Independent episodes of one game."""
    rows: list[dict[str, Any]] = []
    for trial in range(num_trials):
        episode = player.play(oracle_with_errors(random.Random(f"{seed}/{task}/{trial}"), epsilon))
        rows.append(
            {
                "task": task,
                "trial": trial,
                "reward": episode.reward,
                "policy": POLICY_NAME.format(epsilon=epsilon),
                "messages": episode.messages,
            }
        )
    return rows


def tree_rows(player: TextWorldPlayer, task: str, num_branches: int, epsilon: float, seed: int) -> list[dict[str, Any]]:
    """A trunk and ``num_branches`` branches, each off an earlier episode at a turn where it then acts differently.

    Branch b leaves at depth about b / num_branches of its parent, so early and late branches both occur.
    """
    rng = random.Random(f"{seed}/{task}/tree")
    policy = oracle_with_errors(rng, epsilon)
    episodes: list[Episode] = []
    rows: list[dict[str, Any]] = []
    for trial in range(num_branches + 1):
        parent, branch_turn, prefix, forbidden = None, 0, [], set()
        if trial:
            parent = rng.randrange(trial)
            last_turn = len(episodes[parent].actions) - 1
            branch_turn = min(1 + (trial - 1) * last_turn // num_branches, last_turn)
            prefix = episodes[parent].actions[:branch_turn]
            # Every earlier episode with this prefix has taken an action here that is not to be taken again.
            forbidden = {
                episode.actions[branch_turn]
                for episode in episodes
                if len(episode.actions) > branch_turn and episode.actions[:branch_turn] == prefix
            }
        episode = player.play(policy, prefix, forbidden)
        episodes.append(episode)
        rows.append(
            {
                "task": task,
                "trial": trial,
                "parent": parent,
                "branch_turn": branch_turn,
                "reward": episode.reward,
                "policy": POLICY_NAME.format(epsilon=epsilon),
                "messages": episode.messages,
            }
        )
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write gzipped JSON lines; the file appears whole or not at all, and its bytes depend on the rows only."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.replace(partial, path)


def generate(
    out: Path,
    *,
    num_tasks: int = 8,
    num_trials: int = 8,
    num_branches: int = 6,
    epsilon: float = 0.5,
    max_turns: int = 16,
    num_objects: int = 10,
    quest_length: int = 6,
    seed: int = 100,
) -> tuple[Path, Path]:
    """Make the games, play them and write both files into ``out``.

    Games are numbered ``seed``, ``seed + 1``, …; ``max_turns`` bounds the actions of an episode. Returns the step and
    the tree file.
    """
    steps: list[dict[str, Any]] = []
    trees: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_tasks):
            spec = GameSpec(seed=seed + number, num_objects=num_objects, quest_length=quest_length)
            with TextWorldPlayer(make_game(spec, Path(folder)), max_turns) as player:
                steps += step_rows(player, spec.task, num_trials, epsilon, seed)
                trees += tree_rows(player, spec.task, num_branches, epsilon, seed)
            print(f"{spec.task}: {num_trials} episodes, a tree of {num_branches + 1}", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    step_file, tree_file = out / "textworld_step.jsonl.gz", out / "textworld_tree.jsonl.gz"
    write_rows(step_file, steps)
    write_rows(tree_file, trees)
    return step_file, tree_file


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m psrl.agents.textworld_traces",
        description="Make TextWorld games, play them, and write step-wise and tree traces as chat rows.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--tasks", type=int, default=8, help="games (default 8)")
    parser.add_argument("--trials", type=int, default=8, help="episodes of a game in the step file (default 8)")
    parser.add_argument("--branches", type=int, default=6, help="branches of a game's tree (default 6)")
    parser.add_argument("--epsilon", type=float, default=0.5, help="probability of a random action (default 0.5)")
    parser.add_argument("--max-turns", type=int, default=16, help="actions of an episode at most (default 16)")
    parser.add_argument("--objects", type=int, default=10, help="things in a game: they lengthen texts (default 10)")
    parser.add_argument("--quest-length", type=int, default=6, help="actions of the shortest win (default 6)")
    parser.add_argument("--seed", type=int, default=100, help="number of the first game (default 100)")
    options = parser.parse_args(argv)
    for name in ("tasks", "trials", "max_turns", "objects", "quest_length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.branches < 0 or not 0 <= options.epsilon <= 1:
        parser.error("--branches must not be negative, and --epsilon must be between 0 and 1")
    files = generate(
        options.out,
        num_tasks=options.tasks,
        num_trials=options.trials,
        num_branches=options.branches,
        epsilon=options.epsilon,
        max_turns=options.max_turns,
        num_objects=options.objects,
        quest_length=options.quest_length,
        seed=options.seed,
    )
    for file in files:
        print(file)


if __name__ == "__main__":
    main()
