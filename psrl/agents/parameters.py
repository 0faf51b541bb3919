"""Parameters of an agent loop, as ``configs/agents.yaml`` and the command line give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from psrl.agents.actions import action_format
from psrl.agents.env.base import ENVIRONMENTS
from psrl.agents.episode import EpisodeOptions
from psrl.agents.strategies import make_strategy
from psrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AgentParameters:
    """Checked when made.

    Raises:
        ConfigError: a value is out of range or contradicts another; names the key.
    """

    environment: str
    """``textworld``, ``alfworld``, ``search`` or ``webshop``."""
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the environment's class."""
    strategy: str = "step"
    """How turns become samples: ``linear``, ``step``, ``step_window``, ``step_no_think``, ``tree`` or ``tree_step``."""
    window: int | None = None
    """Turns of history, ``step_window`` only."""
    action_format: str = "line"
    """How actions are asked for: ``line`` (``Action: …``) or ``menu`` (a letter). A dataset row may say otherwise."""
    discount: float = 1.0
    """Of the return of a turn (``psrl_return``), for every turn between it and the reward."""
    max_turns: int = 16
    max_turn_tokens: int | None = None
    branch_turns: tuple[int, ...] = ()
    num_branches: int = 0
    invalid_action_penalty: float = 0.0
    turn_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.environment not in ENVIRONMENTS:
            raise ConfigError(f"environment must be one of {', '.join(ENVIRONMENTS)}, got {self.environment!r}")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"discount must be above 0 and at most 1, got {self.discount}")
        action_format(self.action_format)
        options = self.episode_options()
        if make_strategy(self.strategy, window=self.window).branches != bool(options.branch_turns):
            raise ConfigError(
                f"branch_turns is {list(options.branch_turns)}, but the strategy is {self.strategy}: "
                "tree and tree_step need at least one, no other strategy has any"
            )
        if bool(options.branch_turns) != bool(options.num_branches):
            raise ConfigError(
                f"num_branches is {options.num_branches}, but branch_turns is {list(options.branch_turns)}: "
                "set both or neither"
            )

    def episode_options(self) -> EpisodeOptions:
        return EpisodeOptions(**{item.name: getattr(self, item.name) for item in fields(EpisodeOptions)})

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> AgentParameters:
        """Parameters from plain values.

        Args:
            where: what the values are of, for messages.

        Raises:
            ConfigError: a key is unknown or missing, or a value is wrong; names the key.
        """
        known = [item.name for item in fields(cls)]
        unknown = values.keys() - set(known)
        if unknown:
            raise ConfigError(f"{where} has no key {', '.join(sorted(unknown))} (it has: {', '.join(known)})")
        if "environment" not in values:
            raise ConfigError(f"{where} needs environment, one of {', '.join(ENVIRONMENTS)}")
        try:
            return cls(**{**values, "branch_turns": tuple(values.get("branch_turns") or ())})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except TypeError as error:  # a comparison with a value of another type
            raise ConfigError(f"{where}: a value has a wrong type: {error}: {dict(values)}") from error
