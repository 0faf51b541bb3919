"""``psrl``: the command line.

Exit codes: 0 done; 1 a check failed (``replay --sharing both`` found a difference, ``doctor`` something to fix) or a
job did not come to its end; 2 the input, an option or the model is not usable, with one line on stderr; 70 another
process of the training is gone or has failed; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer

    from psrl import __version__
    from psrl.cli.analyze import analyze
    from psrl.cli.bench import bench
    from psrl.cli.doctor import doctor
    from psrl.cli.plan import plan
    from psrl.cli.replay import replay
    from psrl.cli.root import Group
    from psrl.cli.sft import sft
    from psrl.cli.simulate import simulate
    from psrl.cli.train import train
    from psrl.cli.tune import tune
except KeyboardInterrupt:  # before there is a command line to handle it
    print("psrl: interrupted", file=sys.stderr)
    sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"psrl {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Group,
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


app.command()(analyze)
app.command()(bench)
app.command()(doctor)
app.command()(plan)
app.command()(replay)
app.command()(sft)
app.command()(simulate)
app.command()(train)
app.command()(tune)

if __name__ == "__main__":
    app()
