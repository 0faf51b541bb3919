"""TextWorld: games made from a seed, solved by following an objective through rooms. Needs the ``textworld`` extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psrl.agents.env.base import Environment, Observation, task_value
from psrl.agents.games import (
    TEXTWORLD_LOCK,
    GameSpec,
    TurnState,
    ensure_game,
    game_text,
    games_folder,
    read_state,
    start_game,
)
from psrl.errors import InputError


class TextWorldEnvironment(Environment):
    """Reward 1 for completing the quest, and ``progress_reward`` for every action that comes closer to it.

    Keys of a task: ``seed``, ``num_rooms``, ``num_objects``, ``quest_length`` (they decide the game), optional
    ``games`` (folder of games made ahead; a game that is not there is made), ``hidden_commands`` (first words of
    commands that are not offered, unless a winning play needs them).

    No copies: a game is replayed in milliseconds, a copy of the interpreter takes a tenth of a second.
    """

    def __init__(self, progress_reward: float = 0.0) -> None:
        """
        Args:
            progress_reward: reward of an action for every step that it comes closer to the end of the quest.
        """
        self.progress_reward = progress_reward
        self._game: Any = None
        self._hidden: tuple[str, ...] = ()
        self.oracle_commands: list[str] = []
        """The rest of a winning play, for scripted policies and supervised data."""

    def reset(self, task: Mapping[str, Any]) -> Observation:
        spec = GameSpec(
            seed=task_value(task, "seed", int),
            num_rooms=task_value(task, "num_rooms", int),
            num_objects=task_value(task, "num_objects", int),
            quest_length=task_value(task, "quest_length", int),
        )
        self._hidden = tuple(task_value(task, "hidden_commands", list, []))
        folder = Path(task_value(task, "games", str, str(games_folder())))
        with TEXTWORLD_LOCK:
            self.close()
            self._game = start_game(ensure_game(spec, folder))
            return self._observation(read_state(self._game.reset()), first=True)

    def step(self, action: str) -> Observation:
        if self._game is None:
            raise InputError("step before reset")
        with TEXTWORLD_LOCK:
            game_state, _, done = self._game.step(action)
            return self._observation(read_state(game_state), done=done)

    def _observation(self, state: TurnState, *, first: bool = False, done: bool = False) -> Observation:
        self.oracle_commands = state.oracle_commands
        offered = tuple(
            command
            for command in state.commands
            if command.split()[0] not in self._hidden or command in state.oracle_commands
        )
        return Observation(
            text=game_text(state, first=first),
            reward=float(state.won) + self.progress_reward * max(0, state.progress),
            done=done or state.won or state.lost,
            admissible=offered or tuple(state.commands),
            success=state.won,
        )

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None
