"""What every command line of psrl has: errors of the user's as one line, and exit codes.

Exit codes: 2 the input, an option or the model is not usable, with one line on stderr; 70 another
process of the training is gone or has failed; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from psrl.errors import PSRLError, RankError

EXIT_USAGE, EXIT_LOST, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 70, 130, 143

# typer re-exports this subclass only; which click it belongs to differs between its versions.
_CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _OneLineErrors:
    """Goes before a command's class: reports every error that is the user's as one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            with _stopped_by_sigterm():
                code = super().main(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        except RankError as error:
            code = _fail(str(error), EXIT_LOST)
        except PSRLError as error:
            code = _fail(str(error))
        except _CLICK_ERROR as error:
            code = _fail(error.format_message())
        except (KeyboardInterrupt, typer.Abort):
            code = EXIT_INTERRUPTED
        if code == EXIT_INTERRUPTED:
            print("psrl: interrupted", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Leave through the context managers, so that temporary folders go, where the process would just end."""

    def stop(*_: object) -> None:
        sys.exit(EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _fail(message: str, code: int = EXIT_USAGE) -> int:
    print(f"psrl: error: {' '.join(message.split())}", file=sys.stderr)
    return code


class Group(_OneLineErrors, TyperGroup):
    """Of a program with several commands."""


class _Command(_OneLineErrors, TyperCommand):
    """Of a program that is one command."""


def command_line(function: Callable[..., None]) -> typer.Typer:
    """A program whose options are the function's parameters."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=_Command)(function)
    return app
