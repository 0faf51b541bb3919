"""``psrl train``: veRL's PPO trainer with psrl's plug-in in every process.

The same as ``python -m verl.trainer.main_ppo --config-dir configs --config-name NAME OVERRIDES...``, with the
environment variables of the configuration (``ray_kwargs.ray_init.runtime_env.env_vars``) in the driver too, and with
the job checked before Ray starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psrl.errors import JobError
from psrl.replay.checkpoint import check_weights

EXIT_FAILED = 1
"""A job that had begun did not come to its end."""

ConfigName = Annotated[
    str, typer.Option("--config-name", "-cn", help="A file of the configuration folder, without .yaml.")
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(help="Configuration folder; if not given, ./configs, else the one beside the psrl package."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the job, print its configuration and exit.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides as veRL users write them.", show_default=False),
]


def train(
    config_name: ConfigName = "psrl_trainer",
    config_dir: ConfigDir = None,
    dry_run: DryRun = False,
    overrides: Overrides = None,
) -> None:
    """Run an RL job: verl.trainer.main_ppo with prefix sharing.

    Example: psrl train --config-name cpu_quickstart trainer.total_training_steps=1
    """
    from psrl.integrations.verl.job.launch import run_job  # veRL and Ray take seconds to import

    try:
        run_job(config_name, config_dir, overrides or [], dry_run=dry_run, check_weights=check_weights)
    except JobError as error:
        print(f"psrl: error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from error
