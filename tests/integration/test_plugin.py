"""The plug-in is in a process, or the process fails with the reason."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = "psrl.integrations.verl.plugin"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**kept, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_the_plugin_registers_everything():
    code = """
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
modes = [get_trainer_cls(f"psrl_{mode}").upstream_mode for mode in ("sync", "colocate_async", "separate_async")]
print(modes, get_device_name(), ("hf", "async") in _ROLLOUT_REGISTRY)
print(EngineRegistry.get_engine_cls("value_model", "psrl").__name__)
from types import SimpleNamespace
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.workers.engine_workers import TrainingWorker
from psrl.integrations.verl.trainer.workers import PSRLActorRolloutRefWorker, PSRLTrainingWorker, _ObservedWorkerMixin
for name in ("train_mini_batch", "infer_batch"):
    ours, theirs = (getattr(getattr(worker, name), MAGIC_ATTR) for worker in (PSRLTrainingWorker, TrainingWorker))
    print(name, ours["blocking"] == theirs["blocking"], len(ours["dispatch_mode"]), len(theirs["dispatch_mode"]))
print("init_model", getattr(PSRLActorRolloutRefWorker.init_model, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL)
class Base:
    def init_model(self):
        self.actor, self.ref = (SimpleNamespace(engine=SimpleNamespace(planner=SimpleNamespace())) for _ in range(2))
class Worker(_ObservedWorkerMixin, Base):
    pass
worker = Worker()
worker.init_model()
print("one for both", worker.actor.engine.planner.last_forward is worker.ref.engine.planner.last_forward)
"""
    done = run(code, VERL_USE_EXTERNAL_MODULES=PLUGIN, VERL_PLATFORM="cpu")
    assert done.returncode == 0, done.stderr
    assert "['sync', 'colocate_async', 'separate_async'] cpu True" in done.stdout
    for line in (
        "train_mini_batch True 2 2",
        "infer_batch True 2 2",
        "init_model True",
        "one for both True",
        "PSRLEngineWithValueHead",
    ):
        assert line in done.stdout, done.stdout


def test_processes_without_engines_do_not_import_megatron():
    """Of rewards and of the rollout; the plug-in is loaded all the same, and registers engines when veRL asks."""
    code = """
import sys
import verl.experimental.reward_loop
import psrl.rollout.server
from verl.utils.device import get_device_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
print("before", get_device_name(), ("hf", "async") in _ROLLOUT_REGISTRY,
      sorted({"megatron.core", "mbridge", "psrl.integrations.verl.engine.sharing"} & set(sys.modules)))
from verl.workers.engine import EngineRegistry
print("after", EngineRegistry.get_engine_cls("language_model", "psrl").__name__)
"""
    done = run(code, VERL_USE_EXTERNAL_MODULES=PLUGIN, VERL_PLATFORM="cpu")
    assert done.returncode == 0, done.stderr
    assert "before cpu True []" in done.stdout
    assert "after PSRLEngineWithLMHead" in done.stdout


def test_a_worker_without_the_plugin_fails_with_the_reason():
    done = run("import psrl.integrations.verl.trainer.workers", VERL_PLATFORM="cpu")
    assert done.returncode != 0
    assert "VERL_USE_EXTERNAL_MODULES='' in process" in done.stderr
    assert f"Set it to {PLUGIN} in every process" in done.stderr


def test_a_plugin_that_does_not_load_says_why():
    code = """
import sys
sys.modules["megatron.core"] = None
import verl
import verl.workers.engine_workers
"""
    done = run(code, VERL_USE_EXTERNAL_MODULES=PLUGIN, VERL_PLATFORM="cpu")
    assert done.returncode != 0
    assert f"psrl: error: the veRL plug-in {PLUGIN} does not load" in done.stderr
