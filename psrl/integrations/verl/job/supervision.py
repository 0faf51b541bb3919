"""The driver's watch over a job's Ray actors: the job ends with one line that names the process that died.

Without it, what ends the job is whatever error the death causes first, somewhere (a collective's lost peer, a request
without an answer), and some deaths cause none: an agent loop that is gone leaves the trainer waiting for its rollouts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from psrl.errors import JobError, PSRLError

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""For the job to end by itself after a death: the trainer's last act is to end TransferQueue's actors."""
_NOT_DEATHS = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")
"""Reasons of Ray's that are the job's own doing, or follow from another death."""
_INTENDED = ("INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT")
_RANK = re.compile(r"_(\d+):(\d+)$")
_ROLES = {
    "PSRLTaskRunner": "the trainer",
    "TaskRunnerV1": "the trainer",
    "AgentLoopWorkerTQ": "an agent loop worker",
    "PSRLAgentLoopWorker": "an agent loop worker",
    "CheckpointEngineWorker": "what loads weights into a rollout",
    "RewardLoopWorker": "a reward worker",
    "GlobalRequestLoadBalancer": "the rollouts' load balancer",
    "TransferQueueController": "TransferQueue's controller",
    "SimpleStorageUnit": "a storage unit of TransferQueue",
}


@dataclass(frozen=True, slots=True)
class Actor:
    """A row of Ray's table of actors."""

    class_name: str
    name: str
    pid: int
    node: str
    ended: int
    """When it died; 0 while it lives."""
    cause: str
    """Of its death; "" if it lives or ended as it should."""

    def describe(self, ranks_per_node: int) -> str:
        """What it is in the job, and which process."""
        rank = _RANK.search(self.name)
        if self.class_name in _ROLES:
            role = _ROLES[self.class_name]
        elif rank and "WorkerDict" in self.name:
            role = f"the training worker of rank {int(rank[1]) * ranks_per_node + int(rank[2])}"
        elif "server" in f"{self.class_name} {self.name}".lower():
            role = f"rollout server {self.name}"
        else:
            role = f"process {self.class_name}"
        return f"{role} (pid {self.pid} on {self.node})"


def read_actors() -> list[Actor]:
    """The actors of this driver's job."""
    # Beneath ray.util.state, whose server is part of the dashboard, which jobs switch off.
    from ray._private import state

    table: dict[str, dict[str, Any]] = state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    return [_actor(row) for row in table.values()]


def _actor(row: dict[str, Any]) -> Actor:
    is_dead = row["State"] == "DEAD"
    return Actor(
        class_name=row["ActorClassName"].rsplit(".", 1)[-1],
        name=row["Name"],
        pid=row["Pid"],
        node=row["Address"]["IPAddress"],
        ended=row["EndTime"] if is_dead else 0,
        cause=_cause(row["DeathCause"]) if is_dead else "",
    )


def _cause(death: Any) -> str:
    """From an ``ActorDeathCause``; "" unless a process or its node was lost."""
    kind = death.WhichOneof("context")
    if kind == "oom_context":
        return "killed by Ray for want of memory"
    if kind != "actor_died_error_context":
        return ""  # of its constructor: that error reaches whoever made the actor
    context = death.actor_died_error_context
    reason = context.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number[context.reason].name
    if reason in _NOT_DEATHS or any(word in context.error_message for word in _INTENDED):
        return ""
    return "its node is lost" if reason == "NODE_DIED" else "killed, out of memory or crashed"


def first_death(actors: list[Actor]) -> Actor | None:
    """The one that died first; what it took with it died after it."""
    dead = [actor for actor in actors if actor.cause]
    return min(dead, key=lambda actor: actor.ended) if dead else None


class SupervisedRunner:
    """Goes where ``verl.trainer.main_ppo.run_ppo`` takes its task runner's class: calls that wait for the job's end end
    at a death too."""

    def __init__(self, actor_class: Any, *, ranks_per_node: int, way_on: Callable[[], str]) -> None:
        """
        Args:
            actor_class: of the task runner, ``ray.remote`` applied.
            way_on: how to go on after a death, a sentence; asked for then.
        """
        self._actor_class, self._ranks_per_node, self._way_on = actor_class, ranks_per_node, way_on

    def options(self, **options: Any) -> SupervisedRunner:
        return SupervisedRunner(
            self._actor_class.options(**options), ranks_per_node=self._ranks_per_node, way_on=self._way_on
        )

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """A handle with ``run.remote(config)``, as an actor's."""
        actor = self._actor_class.remote(*args, **kwargs)
        return SimpleNamespace(run=_Run(actor, self._ranks_per_node, self._way_on))


@dataclass(frozen=True, slots=True)
class _Run:
    """The method of a task runner that runs the job."""

    actor: Any
    ranks_per_node: int
    way_on: Callable[[], str]

    def remote(self, *args: Any) -> Any:
        """Returns at the job's end, with the reference to its result, which may be an error.

        Raises:
            JobError: a process of the job died; names it.
        """
        result = self.actor.run.remote(*args)
        death = None
        while not death and not ray.wait([result], timeout=POLL_SECONDS)[0]:
            death = first_death(read_actors())
        has_ended = bool(ray.wait([result], timeout=GRACE_SECONDS if death else 0)[0])
        error = _error_of(result) if has_ended else None
        if death is None and error is not None and own_error(error) is None:
            death = _late_death()
        if death is None or (has_ended and error is None):
            return result
        raise JobError(f"{death.describe(self.ranks_per_node)} died: {death.cause}. {self.way_on()}") from error


def _error_of(result: Any) -> BaseException | None:
    try:
        ray.get(result)
    except Exception as error:  # whatever the job failed with: the caller raises it
        return error
    return None


def _late_death() -> Actor | None:
    """The job's error may be here before Ray's table knows the death that caused it."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (death := first_death(read_actors())) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)
    return death


def own_error(error: BaseException) -> PSRLError | None:
    """psrl's own error that a remote one carries; None if it carries another."""
    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return type(cause)(str(cause)) if isinstance(cause, PSRLError) else None
