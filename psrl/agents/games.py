"""TextWorld games: made from a few numbers, read as text. Needs the ``textworld`` extra."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import textworld
from textworld.generator import compile_game
from textworld.generator import make_game as sample_game

from psrl.files import cache_dir

TEXTWORLD_LOCK = threading.Lock()
"""Held by every thread that loads or steps a game: textworld parses with one module-level parser."""


class TurnState(NamedTuple):
    """What an agent and the oracle know before an action."""

    text: str
    """The game's answer to the last action, as it printed it."""
    objective: str
    commands: list[str]
    """Commands that the game accepts now."""
    oracle_commands: list[str]
    """The rest of a winning play."""
    won: bool
    lost: bool = False
    progress: int = 0
    """1 where the last action came closer to the goal, -1 where it led away from it, else 0."""


@dataclass(frozen=True, slots=True)
class GameSpec:
    """What decides a game, together with TextWorld's version."""

    seed: int
    num_rooms: int = 4
    num_objects: int = 10
    quest_length: int = 6

    @property
    def task(self) -> str:
        return f"textworld-{self.seed}"


def make_game(spec: GameSpec, folder: Path) -> Path:
    """Generate and compile a game into ``folder``; returns the game file. Takes about a second."""
    options = textworld.GameOptions()
    options.seeds = spec.seed
    options.nb_rooms = spec.num_rooms
    options.nb_objects = spec.num_objects
    options.quest_length = spec.quest_length
    options.path = str(folder / f"{spec.task}.z8")
    return Path(compile_game(sample_game(options), options))


def games_folder() -> Path:
    """Where games are kept that no other place was named for."""
    return cache_dir() / "textworld"


def ensure_game(spec: GameSpec, folder: Path) -> Path:
    """The game file of ``spec`` below ``folder``; makes it where it is absent. Safe in concurrent processes."""
    size = f"rooms{spec.num_rooms}_objects{spec.num_objects}_quest{spec.quest_length}"
    game_file = folder / size / f"{spec.task}.z8"
    if game_file.is_file():
        return game_file
    game_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=game_file.parent) as partial:
        made = make_game(spec, Path(partial))
        # The world model beside the game file goes first: a game file that exists is whole.
        os.replace(made.with_suffix(".json"), game_file.with_suffix(".json"))
        os.replace(made, game_file)
    return game_file


def start_game(game_file: Path) -> Any:
    """A ``textworld`` environment that reports what ``read_state`` reads."""
    infos = textworld.EnvInfos(
        feedback=True,
        objective=True,
        admissible_commands=True,
        policy_commands=True,
        intermediate_reward=True,
        won=True,
        lost=True,
    )
    return textworld.start(str(game_file), infos)


def read_state(state: Any) -> TurnState:
    """Our record of a ``textworld.GameState``."""
    return TurnState(
        text=state.feedback,
        objective=state.objective,
        commands=state.admissible_commands,
        oracle_commands=state.policy_commands,
        won=state.won,
        lost=state.lost,
        progress=state.intermediate_reward,
    )


def game_text(state: TurnState, *, first: bool = False) -> str:
    """The game's text without title banner, prompt and status line."""
    text = state.text[state.text.index(state.objective) :] if first else state.text
    text = re.sub(r"\n> +-= .*$", "", text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def commands_line(commands: Collection[str]) -> str:
    return f"Commands: [{', '.join(commands)}]"
