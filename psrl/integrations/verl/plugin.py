"""What ``VERL_USE_EXTERNAL_MODULES=psrl.integrations.verl.plugin`` loads into every veRL process.

Importing this module registers the engines, the ``hf`` rollout and the trainers; with ``VERL_PLATFORM=cpu`` it makes
the CPU veRL's platform. A failure is reported on stderr whatever the caller does with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.verl.train_config import PLUGIN, PLUGIN_VARIABLE


def require() -> None:
    """Check that this process was started for psrl.

    Raises:
        ConfigError: veRL was told to load other modules only; names the variable.
    """
    value = os.environ.get(PLUGIN_VARIABLE, "")
    if PLUGIN not in [name.strip() for name in value.split(",")]:
        raise ConfigError(
            f"{PLUGIN_VARIABLE}={value!r} in process {os.getpid()}: veRL would run here without psrl's plug-in. Set it "
            f"to {PLUGIN} in every process (psrl train does; for workers of a running Ray cluster, "
            f"ray_kwargs.ray_init.runtime_env.env_vars.{PLUGIN_VARIABLE})"
        )


def _load() -> None:
    # First: veRL's engine modules ask for the device when they are imported.
    from psrl.integrations.verl import platform

    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        platform.install()
    importlib.import_module("psrl.integrations.verl.engine")
    # Above this layer, and optional: found by name.
    if importlib.util.find_spec("psrl.rollout") is not None:
        importlib.import_module("psrl.rollout").register()
    _register_trainers()


def _register_trainers() -> None:
    """The trainers need TransferQueue, which veRL itself imports only where a trainer or an agent loop runs."""
    if importlib.util.find_spec("transfer_queue") is None:
        return
    importlib.import_module("psrl.integrations.verl.trainer")


try:
    _load()
except BaseException as error:
    print(f"psrl: error: the veRL plug-in {PLUGIN} does not load: {error!r}", file=sys.stderr, flush=True)
    if isinstance(error, ImportError):
        raise UnsupportedError(f"the veRL plug-in {PLUGIN} does not load: {error}") from error
    raise
