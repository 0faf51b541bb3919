"""A progress bar on stderr; silent where stderr is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_NAMES = {"old_log_prob": "old log-prob", "ref": "reference", "update": "update"}


class Progress:
    """Counts executions of phases; within one, the micro-batches that have begun."""

    def __init__(self, total: int, repeats: int, *, is_shown: bool = True) -> None:
        """
        Args:
            total: executions to come: building a side is one, and so is each repeat of a phase on a side.
            is_shown: False on ranks that leave it to another to say anything.
        """
        self._is_shown = is_shown
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._repeats = repeats
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[micro_batch]}"),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            disable=not (is_shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total, micro_batch="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, num_executions: int) -> None:
        """There will be more of them than was known."""
        self._bar.update(self._task, total=(self._bar.tasks[self._task].total or 0) + num_executions)

    @contextlib.contextmanager
    def task(self, name: str, side: str, repeat: int = 0) -> Iterator[None]:
        """One execution."""
        times = f" {repeat + 1}/{self._repeats}" if self._repeats > 1 and name in _NAMES else ""
        self._bar.update(self._task, description=f"{_NAMES.get(name, name)}{times} ({side})", micro_batch="")
        yield
        self._bar.advance(self._task)

    def micro_batch(self, number: int) -> None:
        self._bar.update(self._task, micro_batch=f"micro-batch {number}")

    def note(self, text: str) -> None:
        """A line that stays, also where there is no bar."""
        if self._is_shown:
            self.console.print(f"note: {text}", markup=False)
