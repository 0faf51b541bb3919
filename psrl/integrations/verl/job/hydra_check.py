"""Hydra's callback that checks a job of ``python -m verl.trainer.main_ppo`` before Ray starts; see psrl/job.yaml.

``psrl train`` composes without callbacks and does the same by itself; the trainer checks once more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from psrl.errors import PSRLError
from psrl.integrations.verl.job.config import validate_job
from psrl.integrations.verl.job.launch import CONFIG_DIR_VARIABLE, check_files, holds_configs, hydra_errors

EXIT_REFUSED = 2
"""As ``psrl train`` has it."""


class JobCheck(Callback):
    """Ends the process with one line on stderr where a job cannot run."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Sets PSRL_CONFIG_DIR, where it is not set: the job's configuration then finds the files beside it from any
        working directory, here and in a Ray cluster that this process starts.

        Raises:
            SystemExit: the job is refused. Hydra turns an ``Exception`` of a callback into a warning and goes on.
        """
        for source in HydraConfig.get().runtime.config_sources:
            if source.schema == "file" and holds_configs(Path(source.path)):
                os.environ.setdefault(CONFIG_DIR_VARIABLE, source.path)
        try:
            with hydra_errors():
                validate_job(config)
                check_files(config)
        except PSRLError as error:
            print(f"psrl: error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_REFUSED) from error
