"""The interface of an environment, and how one is made by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from psrl.errors import ConfigError, InputError, PSRLError, UnsupportedError

FREE_TEXT = "[...]"
"""Ends an admissible action whose bracket takes any text: ``search[...]``."""


class EnvironmentFault(PSRLError, RuntimeError):
    """An environment broke: its server is away, or a replayed action had another effect than before."""


class Observation(NamedTuple):
    """What an environment shows after ``reset`` or an action."""

    text: str
    reward: float = 0.0
    """Earned by the last action."""
    done: bool = False
    admissible: tuple[str, ...] | None = None
    """Actions accepted now, where the environment knows them; one may end in ``[...]``, which stands for any text."""
    success: bool = False
    """Whether the task is solved."""


class Environment(ABC):
    """One episode at a time. Not thread-safe, but may be called from a different thread each time."""

    supports_copy = False

    @abstractmethod
    def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin an episode of a task: the environment's part of a dataset row.

        Raises:
            InputError: the task lacks a key or has a wrong value.
            EnvironmentFault: the environment cannot be reached.
        """

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Take an action. One that the environment does not understand gets a text that says so."""

    def copy(self) -> Environment:
        """An independent environment in the same state, where ``supports_copy``."""
        raise UnsupportedError(f"{type(self).__name__} has no copy: replay its actions instead")

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Let go of files, processes and connections. The environment is not used after it."""


_CLASSES = {
    "textworld": "psrl.agents.env.textworld.TextWorldEnvironment",
    "alfworld": "psrl.agents.env.alfworld.ALFWorldEnvironment",
    "search": "psrl.agents.env.search.SearchEnvironment",
    "webshop": "psrl.agents.env.webshop.WebShopEnvironment",
}
ENVIRONMENTS = tuple(_CLASSES)


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """An environment by name.

    Args:
        options: arguments of its class.

    Raises:
        ConfigError: no environment of that name, an unknown option, or a package that it needs is not installed.
    """
    if name not in _CLASSES:
        raise ConfigError(f"environment must be one of {', '.join(ENVIRONMENTS)}, got {name!r}")
    module, _, attribute = _CLASSES[name].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {name} needs the package {error.name}, which is not installed: pip install 'psrl[{name}]'"
        ) from error
    options = dict(options or {})
    unknown = options.keys() - inspect.signature(cls).parameters.keys()
    if unknown:
        known = ", ".join(inspect.signature(cls).parameters) or "none"
        raise ConfigError(f"environment {name} has no option {', '.join(sorted(unknown))} (it has: {known})")
    return cls(**options)


def task_value(task: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A value of a task, checked.

    Raises:
        InputError: it is missing and has no default, or is no ``kind``.
    """
    value = task.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"the task has no {key}: {dict(task)}")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{key} of the task must be of type {kind.__name__}, got {value!r}")
    return value
