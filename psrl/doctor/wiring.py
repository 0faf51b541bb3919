"""psrl inside veRL and Megatron-Core, looked at in a process of its own so that this one stays unpatched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from psrl.doctor.finding import Finding, State

SECTION = "wiring"
_PLUGIN = "psrl.integrations.verl.plugin"
_PROBE = """
import json
from psrl.integrations.verl import compat
with compat.quiet_upstream():
    import verl  # loads the plug-in, as in every process of a job
    from verl.workers.engine import EngineRegistry
    from psrl.integrations.megatron.local_spec import uses_transformer_engine
    from psrl.integrations.megatron import cpu_device
    from psrl.integrations.verl import platform
    import torch
    compat.install()
    platform.install()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = EngineRegistry.get_engine_cls(model_type="language_model", backend="psrl")
print("psrl-doctor " + json.dumps({
    "device": device, "engine": engine.__name__,
    "layers": "TransformerEngine" if uses_transformer_engine() else "PyTorch",
    "hooks": sum(hooks.num_applied for hooks in (compat.HOOKS, platform.HOOKS, cpu_device.HOOKS)),
}))
"""


def check_wiring() -> Iterator[Finding]:
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": _PLUGIN}
    if not torch.cuda.is_available():
        environment["VERL_PLATFORM"] = "cpu"
    probe = subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True)
    answers = [line for line in probe.stdout.splitlines() if line.startswith("psrl-doctor ")]
    if probe.returncode or not answers:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            SECTION, "veRL's engine", State.WRONG, last[:300], "fix the packages above; scripts/setup.sh installs all"
        )
        return
    found = json.loads(answers[-1].removeprefix("psrl-doctor "))
    yield Finding(SECTION, "veRL's engine", State.OK, f"backend psrl is {found['engine']} on {found['device']}")
    yield Finding(SECTION, "hooks", State.OK, f"{found['hooks']} applied to the upstreams, each with its cause in code")
    layers = f"layers of {found['layers']}"
    if found["device"] == "cuda" and found["layers"] != "TransformerEngine":
        yield Finding(SECTION, "layers", State.ABSENT, f"{layers}: slower", "pip install 'psrl[gpu]'")
    else:
        yield Finding(SECTION, "layers", State.OK, layers)


def check_patches() -> Iterator[Finding]:
    """Of the source tree that psrl is imported from; a wheel has none."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "apply_patches.py"
    if not script.is_file():
        yield Finding(
            SECTION,
            "patches",
            State.ABSENT,
            "psrl is not imported from a source tree",
            "needed only if patches/ lists any",
        )
        return
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    text = " ".join((result.stdout + result.stderr).split())
    if result.returncode:
        yield Finding(SECTION, "patches", State.WRONG, text, "scripts/apply_patches.sh")
    else:
        yield Finding(SECTION, "patches", State.OK, text)
