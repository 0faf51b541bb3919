"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    OK = "ok"
    ABSENT = "absent"
    """Optional, and not there: what it would add does not run."""
    WRONG = "wrong"
    """psrl does not run, or not right, before this is fixed."""


@dataclass(frozen=True, slots=True)
class Finding:
    section: str
    name: str
    state: State
    detail: str
    fix: str = ""
    """What to do, if the state is not ``OK``."""


Check = Callable[[], Iterator[Finding]]
"""Looks at one section."""
