"""In-place changes of an upstream, each with its cause, its place and the condition under which it goes away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hook:
    """One change of an upstream module or class."""

    name: str
    cause: str
    upstream: str
    """``package/file.py:line``, one or more, in the pinned version (``compat.VERL`` and ``compat.MEGATRON_CORE``)."""
    remove_when: str
    apply: Callable[[], None]


class HookSet:
    """Hooks that are applied together, once per process."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._num_applied = 0

    @property
    def hooks(self) -> tuple[Hook, ...]:
        return tuple(self._hooks)

    @property
    def num_applied(self) -> int:
        return self._num_applied

    def add(self, *, cause: str, upstream: str, remove_when: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Decorator: register a function that makes the change."""

        def register(apply: Callable[[], None]) -> Callable[[], None]:
            self._hooks.append(Hook(apply.__name__, cause, upstream, remove_when, apply))
            return apply

        return register

    def install(self) -> None:
        """Apply every hook that is not applied yet, in order."""
        for hook in self._hooks[self._num_applied :]:
            hook.apply()
            self._num_applied += 1
