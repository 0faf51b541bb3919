"""Which of Ray's deaths end a job, and what the message calls the process that died."""

from typing import Any

import pytest
from ray.core.generated import common_pb2 as messages

from psrl.integrations.verl.job.supervision import Actor, _actor, first_death

common_pb2: Any = messages  # its classes are made when it is imported
REASONS = common_pb2.ActorDiedErrorContext.DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_name


def row(reason: str | None = None, message: str = "", ended: int = 5, **fields) -> dict:
    """A row of Ray's table."""
    cause = common_pb2.ActorDeathCause()
    if reason == "OOM":
        cause.oom_context.error_message = message
    elif reason == "CONSTRUCTOR":
        cause.creation_task_failure_context.formatted_exception_string = message
    elif reason is not None:
        cause.actor_died_error_context.reason = REASONS[reason].number
        cause.actor_died_error_context.error_message = message
    return {
        "ActorClassName": "create_colocated_worker_cls.<locals>.WorkerDict",
        "Name": "Gh3kWorkerDict_0:1",
        "State": "ALIVE" if reason is None else "DEAD",
        "Address": {"IPAddress": "10.0.0.7"},
        "EndTime": ended,
        "DeathCause": cause,
        "Pid": 4321,
        **fields,
    }


@pytest.mark.parametrize(
    ("reason", "message", "cause"),
    [
        (None, "", ""),
        ("WORKER_DIED", "Worker exit type: SYSTEM_ERROR", "killed, out of memory or crashed"),
        ("WORKER_DIED", "Worker exit type: INTENDED_USER_EXIT", ""),
        ("NODE_DIED", "", "its node is lost"),
        ("OOM", "", "killed by Ray for want of memory"),
        ("RAY_KILL", "", ""),
        ("OUT_OF_SCOPE", "", ""),
        ("REF_DELETED", "", ""),
        ("OWNER_DIED", "", ""),
        ("CONSTRUCTOR", "ValueError", ""),
    ],
)
def test_which_ends_are_deaths(reason, message, cause):
    assert _actor(row(reason, message)).cause == cause


@pytest.mark.parametrize(
    ("class_name", "name", "says"),
    [
        ("x.WorkerDict", "Gh3kWorkerDict_0:1", "the training worker of rank 1"),
        ("x.WorkerDict", "Gh3kWorkerDict_2:3", "the training worker of rank 19"),
        ("HFServer", "psrl_hf_server_0", "rollout server psrl_hf_server_0"),
        ("vLLMHttpServer", "vllm_server_3_0", "rollout server vllm_server_3_0"),
        ("AgentLoopWorkerTQ", "agent_loop_worker_0_1f", "an agent loop worker"),
        ("psrl.x.PSRLAgentLoopWorker", "agent_loop_worker_0_1f", "an agent loop worker"),
        ("PSRLTaskRunner", "", "the trainer"),
        ("Other", "", "process Other"),
    ],
)
def test_names(class_name, name, says):
    actor = _actor(row(ActorClassName=class_name, Name=name))
    assert actor.describe(ranks_per_node=8) == f"{says} (pid 4321 on 10.0.0.7)"


def test_the_first_death_is_the_cause():
    actors = [
        _actor(row()),
        _actor(row("WORKER_DIED", ended=9, Pid=1)),
        _actor(row("WORKER_DIED", ended=7, Pid=2)),
        _actor(row("RAY_KILL", ended=3, Pid=3)),
    ]
    assert first_death(actors) == Actor(
        "WorkerDict", "Gh3kWorkerDict_0:1", 2, "10.0.0.7", 7, "killed, out of memory or crashed"
    )
    assert first_death(actors[:1]) is None
