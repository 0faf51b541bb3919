"""veRL's workers with the plug-in loaded and with records of what their engines did.

A worker process finds its class by importing this module, so a process without psrl, without the plug-in's environment
or with a plug-in that does not load fails when it is created, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psrl.integrations.megatron import cpu_device
from psrl.integrations.verl import plugin

plugin.require()  # before veRL's engine modules are imported: they ask for the device then

from verl.experimental.separation.engine_workers import DetachActorWorker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: E402

from psrl.integrations.verl.engine.batch_plans import LastForward  # noqa: E402
from psrl.integrations.verl.engine.observability import EngineProbe, PassRecord  # noqa: E402
from psrl.integrations.verl.trainer.planning_worker import PlanningWorker  # noqa: E402

# An enumeration that veRL fills at run time.
_ONE_TO_ALL: Any = getattr(Dispatch, "ONE_TO_ALL")  # noqa: B009

Records = dict[str, list[PassRecord]]


class PSRLTrainingWorker(PlanningWorker):
    """A training worker whose engine is observed; veRL's critic, and the inside of the workers below."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.probe = EngineProbe(self.engine)

    @register(dispatch_mode=_ONE_TO_ALL)
    def psrl_records(self) -> Records:
        """Records since the last call."""
        return {"critic": self.probe.drain()}


class _ObservedWorkerMixin:
    """Goes before ``ActorRolloutRefWorker`` in the bases."""

    actor_worker_cls = PSRLTrainingWorker
    ref_worker_cls = PSRLTrainingWorker
    actor: Any
    ref: Any

    @register(dispatch_mode=_ONE_TO_ALL)
    def init_model(self) -> None:
        """As upstream; the engines share what they plan."""
        super().init_model()  # pyright: ignore[reportAttributeAccessIssue]  of the other base
        last_forward = LastForward()
        for worker in (self.actor, self.ref):
            if worker is not None and worker.engine.planner is not None:
                worker.engine.planner.last_forward = last_forward

    @register(dispatch_mode=_ONE_TO_ALL)
    def psrl_records(self) -> Records:
        """Records since the last call, by role."""
        workers = {"actor": self.actor, "ref": self.ref}
        return {role: worker.probe.drain() for role, worker in workers.items() if worker is not None}

    @register(dispatch_mode=_ONE_TO_ALL)
    def psrl_describe(self) -> dict[str, str]:
        """The actor's engine (without one, the reference's) as the startup line has it."""
        worker = self.actor or self.ref
        return worker.probe.describe() if worker is not None else {}


class PSRLActorRolloutRefWorker(_ObservedWorkerMixin, ActorRolloutRefWorker):
    """Actor, rollout and reference of the synchronous and the colocated trainer."""


class PSRLDetachActorWorker(_ObservedWorkerMixin, DetachActorWorker):
    """Actor, rollout and reference of the separate trainer."""

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """veRL's, which copies into pinned memory: on the CPU there is none (verl/utils/megatron_utils.py:1937)."""
        return cpu_device.device_mode()(super().copy_handler)


OBSERVED: dict[type, type] = {
    ActorRolloutRefWorker: PSRLActorRolloutRefWorker,
    DetachActorWorker: PSRLDetachActorWorker,
    TrainingWorker: PSRLTrainingWorker,
}
"""Worker class by veRL's."""
