"""What ``VERL_USE_EXTERNAL_MODULES=psrl.integrations.verl.plugin`` loads into every veRL process.

With ``VERL_PLATFORM=cpu`` it makes the CPU veRL's platform at once. The engines, the trainers and the ``hf`` rollout
are registered when veRL imports the registry of each, so that a process without engines (of the rollout, a reward, the
data) does not import Megatron for them. A failure is reported on stderr whatever the caller does with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable

from psrl.errors import ConfigError, UnsupportedError
from psrl.integrations.verl import compat, platform
from psrl.integrations.verl.after_import import after_import
from psrl.integrations.verl.job.config import PLUGIN, PLUGIN_VARIABLE


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
    compat.check_versions()
    # At once: veRL asks for the device when its modules are imported.
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        platform.choose()
        after_import("verl.workers.engine_workers", lambda: _reported(platform.install))
    after_import("verl.workers.engine", lambda: _register("psrl.integrations.verl.engine.sharing"))
    # The trainers need TransferQueue, which veRL itself imports only where a trainer or an agent loop runs.
    after_import("verl.trainer.ppo.v1", lambda: _register("psrl.integrations.verl.trainer.trainers"))
    after_import("verl.checkpoint_engine", lambda: _register("psrl.integrations.verl.trainer.gloo_weights"))
    # Above this layer, and optional: found by name.
    if importlib.util.find_spec("psrl.rollout") is not None:
        after_import("verl.workers.rollout", lambda: _reported(importlib.import_module("psrl.rollout").register))


def _register(module: str) -> None:
    """Import a module that registers its classes."""
    _reported(lambda: importlib.import_module(module))


def _reported(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException as error:
        print(f"psrl: error: the veRL plug-in {PLUGIN} does not load: {error!r}", file=sys.stderr, flush=True)
        if isinstance(error, ImportError):
            raise UnsupportedError(f"the veRL plug-in {PLUGIN} does not load: {error}") from error
        raise


_reported(_load)
