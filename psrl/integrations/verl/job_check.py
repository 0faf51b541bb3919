"""Hydra's callback that checks a job of ``python -m verl.trainer.main_ppo`` before Ray starts; see psrl/job.yaml.

``psrl train`` composes without callbacks and checks by itself; the trainer checks once more.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from psrl.errors import PSRLError
from psrl.integrations.verl.train_config import validate_job
from psrl.integrations.verl.train_job import hydra_errors

EXIT_REFUSED = 2
"""As ``psrl train`` has it."""


class JobCheck(Callback):
    """Ends the process with one line on stderr where a job cannot run."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """
        Raises:
            SystemExit: the job is refused. Hydra turns an ``Exception`` of a callback into a warning and goes on.
        """
        try:
            with hydra_errors():
                validate_job(config)
        except PSRLError as error:
            print(f"psrl: error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_REFUSED) from error
