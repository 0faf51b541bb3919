"""What ``VERL_USE_EXTERNAL_MODULES=psrl.integrations.verl.plugin`` loads into every veRL process.

Importing this module registers the engines, and with ``VERL_PLATFORM=cpu`` makes the CPU veRL's platform. veRL logs a
failed import at DEBUG only; to fail loudly, import the module again where it is needed.
"""

from __future__ import annotations

import os

from psrl.integrations.verl import platform

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    platform.install()  # first: veRL's engine modules ask for the device when they are imported

from psrl.integrations.verl import engine

__all__ = ["engine", "platform"]
