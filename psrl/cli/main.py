"""``psrl``: the command line.

Exit codes: 0 done; 1 a check failed (``replay --sharing both`` found a difference); 2 the input, an option or the model
is not usable, with one line on stderr; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Annotated, Any

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143

try:
    import typer
    from typer.core import TyperGroup

    from psrl import __version__
    from psrl.cli.replay import replay
    from psrl.cli.sft import sft
    from psrl.cli.train import train
    from psrl.errors import PSRLError
except KeyboardInterrupt:  # before there is a command line to handle it
    print("psrl: interrupted", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)

# typer re-exports this subclass only; which click it belongs to differs between its versions.
_CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _OneLineErrors(TyperGroup):
    """Reports every error that is the user's as one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            with _stopped_by_sigterm():
                code = super().main(*args, **kwargs)
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


def _fail(message: str) -> int:
    print(f"psrl: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"psrl {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_OneLineErrors,
    help="Exact prefix sharing for reinforcement learning of agents on veRL and Megatron-LM.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command()(replay)
app.command()(sft)
app.command()(train)

if __name__ == "__main__":
    app()
