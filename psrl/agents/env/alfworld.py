"""ALFWorld: household tasks, played from its ``game.tw-pddl`` files by textworld's PDDL engine.

Needs the ``alfworld`` extra (``textworld[pddl]``) and the games, which ``alfworld-download`` of the alfworld package
fetches. That package itself is not needed: what it adds to a game is readable object names, as below.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fast_downward  # noqa: F401 - textworld reports its absence only when a game is loaded
import textworld
import textworld.core

from psrl.agents.env.base import Environment, Observation, task_value
from psrl.agents.games import TEXTWORLD_LOCK
from psrl.errors import InputError

_ESCAPES = (("_bar_", "|"), ("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))


def readable_names(entity_ids: Iterable[str]) -> dict[str, str]:
    """``cabinet_bar__plus_00_dot_45…`` to ``cabinet 2``, numbered as ALFWorld does (alfworld.agents.utils.misc)."""
    kinds: dict[str, str] = {}
    for entity in sorted(entity_ids):
        text = entity
        for escape, character in _ESCAPES:
            text = text.replace(escape, character)
        kind, bar, _ = text.partition("|")
        kinds[entity] = (kind + "basin" if "basin" in entity else kind) if bar else text
    placed = {entity for entity in kinds if "_bar_" in entity}
    left = Counter(kinds[entity] for entity in placed)
    names: dict[str, str] = {}
    for entity, kind in kinds.items():
        names[entity] = f"{kind} {left[kind]}" if entity in placed else f"{kind} "
        if entity in placed:
            left[kind] -= 1
    return names


class _ReadableNames(textworld.core.Wrapper):
    def load(self, *args: Any, **kwargs: Any) -> None:
        super().load(*args, **kwargs)
        entities = self._entity_infos
        names = readable_names(info.id for info in entities.values())
        for info in entities.values():
            info.name = names[info.id]


class ALFWorldEnvironment(Environment):
    """Reward 1 for completing the task.

    Keys of a task: ``game_file``, the path of a ``game.tw-pddl`` file.
    """

    def __init__(self, oracle: bool = False) -> None:
        """
        Args:
            oracle: have the planner solve the rest of the task after every action (about a second at the start).
        """
        self.oracle = oracle
        self._game: Any = None
        self._game_file = ""
        self.oracle_commands: list[str] = []
        """With ``oracle``, the rest of a solution, for scripted policies and supervised data."""

    def reset(self, task: Mapping[str, Any]) -> Observation:
        game_file = task_value(task, "game_file", str)
        if not Path(game_file).is_file():
            raise InputError(f"game_file of the task: no file {game_file} (alfworld-download fetches ALFWorld's games)")
        with TEXTWORLD_LOCK:
            if self._game is None or game_file != self._game_file:
                self.close()
                infos = textworld.EnvInfos(
                    feedback=True, admissible_commands=True, policy_commands=self.oracle, won=True, lost=True
                )
                self._game = textworld.start(game_file, infos, [_ReadableNames()])
                self._game_file = game_file
            return self._observation(self._game.reset(), done=False)

    def step(self, action: str) -> Observation:
        if self._game is None:
            raise InputError("step before reset")
        with TEXTWORLD_LOCK:
            state, _, done = self._game.step(action)
            return self._observation(state, done=done)

    def _observation(self, state: Any, *, done: bool) -> Observation:
        self.oracle_commands = state.policy_commands if self.oracle else []
        text = re.sub(r"^-= Welcome to TextWorld, ALFRED! =-\s*", "", state.feedback.strip())
        return Observation(
            text=text,
            reward=float(state.won),
            done=done or state.won or state.lost,
            # "help" only prints a manual.
            admissible=tuple(command for command in state.admissible_commands if command != "help"),
            success=state.won,
        )

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None
