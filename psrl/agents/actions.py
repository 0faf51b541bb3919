"""How an agent is asked for an action and how its reply is read: a line ``Action: …``, or a letter from a menu."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from psrl.agents.env.base import FREE_TEXT, Observation
from psrl.errors import ConfigError, UnsupportedError


class Reply(NamedTuple):
    """What a response says."""

    action: str | None
    """None where it names no action that is admissible."""
    thought: tuple[int, int]
    """Half-open span of its characters that are thought."""


class ActionFormat(Protocol):
    """Renders observations and reads replies. Stateless."""

    @property
    def name(self) -> str: ...

    @property
    def instructions(self) -> str:
        """For the system prompt."""
        ...

    def render(self, observation: Observation) -> str: ...

    def read(self, text: str, observation: Observation) -> Reply: ...


def match_action(text: str, admissible: Sequence[str] | None) -> str | None:
    """The admissible action that a text names, whatever its case and spaces; the text itself where none are known."""
    words = " ".join(text.split())
    if not words:
        return None
    if admissible is None:
        return words
    for action in admissible:
        if action.endswith(FREE_TEXT):
            opening = action[: -len(FREE_TEXT) + 1]
            if words.lower().startswith(opening.lower()) and words.endswith("]") and words[len(opening) : -1].strip():
                return opening + words[len(opening) : -1].strip() + "]"
        elif words.lower() == " ".join(action.split()).lower():
            return action
    return None


@dataclass(frozen=True, slots=True)
class LineFormat:
    """The action is what follows the last ``Action:`` at the start of a line; what comes before it is thought."""

    name: str = "line"
    instructions: str = (
        "Reply with one short thought and then exactly one command on a line that starts with 'Action:'."
    )

    def render(self, observation: Observation) -> str:
        if observation.admissible is None or observation.done:
            return observation.text
        return f"{observation.text}\nCommands: [{', '.join(observation.admissible)}]"

    def read(self, text: str, observation: Observation) -> Reply:
        found = list(re.finditer(r"^[ \t]*Action:[ \t]*(.*)$", text, flags=re.MULTILINE | re.IGNORECASE))
        if not found:
            return Reply(None, (0, 0))
        return Reply(match_action(found[-1].group(1), observation.admissible), (0, found[-1].start()))


@dataclass(frozen=True, slots=True)
class MenuFormat:
    """Every command has a letter. The reply is the last letter that stands alone; what comes before it is thought.

    Where no letter stands alone, the first capital that is in the menu counts, so that a model that has learnt nothing
    yet acts, and can learn.
    """

    name: str = "menu"
    instructions: str = "Reply with the letter of one command."

    def render(self, observation: Observation) -> str:
        if observation.done:
            return observation.text
        choices = [f"{letter}: {action}" for letter, action in self._menu(observation).items()]
        return "\n".join([observation.text, *choices])

    def read(self, text: str, observation: Observation) -> Reply:
        menu = self._menu(observation)
        alone = [found for found in re.finditer(r"\b[A-Z]\b", text) if found.group() in menu]
        if alone:
            return Reply(menu[alone[-1].group()], (0, alone[-1].start()))
        letter = next((character for character in text if character in menu), None)
        return Reply(menu[letter] if letter else None, (0, 0))

    def _menu(self, observation: Observation) -> dict[str, str]:
        actions = observation.admissible
        if actions is None or any(action.endswith(FREE_TEXT) for action in actions):
            raise UnsupportedError("action_format menu needs an environment that lists its actions: use line")
        if len(actions) > len(string.ascii_uppercase):
            raise UnsupportedError(f"action_format menu has 26 letters, but there are {len(actions)} actions: use line")
        return dict(zip(string.ascii_uppercase, actions, strict=False))


ACTION_FORMATS: dict[str, ActionFormat] = {"line": LineFormat(), "menu": MenuFormat()}


def action_format(name: str) -> ActionFormat:
    """The format of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in ACTION_FORMATS:
        raise ConfigError(f"action_format must be one of {', '.join(ACTION_FORMATS)}, got {name!r}")
    return ACTION_FORMATS[name]


def token_span(ids: Sequence[int], decode: Callable[[Sequence[int]], str], span: tuple[int, int]) -> tuple[int, int]:
    """Tokens that lie wholly inside a span of the decoded characters; a token that straddles an end stays outside.

    Nothing is tokenised: prefixes of the ids are decoded until they spell the text up to the end in question.
    """
    text = decode(ids)
    start, end = span
    if start == end:
        return (0, 0)
    first = _tokens_to(ids, decode, text[:start])
    last = _tokens_to(ids, decode, text[:end])
    if len(decode(ids[:last])) > end:
        last -= 1
    return (first, max(first, last))


def _tokens_to(ids: Sequence[int], decode: Callable[[Sequence[int]], str], text: str) -> int:
    """Fewest leading ids that spell ``text``. Bisects: more ids never spell less."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decode(ids[:middle]).startswith(text) else (middle + 1, high)
    return low
