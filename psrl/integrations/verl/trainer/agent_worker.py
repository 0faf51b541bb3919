"""veRL's agent-loop worker, which also writes fingerprints of what the rows share.

Works with any agent loop: it looks at what veRL's worker puts into TransferQueue. Hooks: ``AgentLoopWorkerTQ`` and
``AgentLoopManagerTQ`` (verl/trainer/ppo/v1/agent_loop_tq.py), named by
``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from psrl.integrations.verl.job.config import job_settings
from psrl.placement.fingerprints import fingerprint_tags

_Worker: Any = AgentLoopWorkerTQ
_UpstreamWorker: type[Any] = _Worker.__ray_actor_class__


class PSRLAgentLoopWorker(_UpstreamWorker):
    """Adds a tag to the rows of training. veRL publishes the prompt as finished after that only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _, settings = job_settings(self.config)
        writes = settings.balance and settings.grouping == "fingerprints"
        self._stride = settings.fingerprint_stride if writes else None

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> None:
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        if validate or self._stride is None or not outputs:
            return
        rows = [np.asarray(one.prompt_ids + one.response_ids, dtype=np.int64) for one in outputs]
        await tq.async_kv_batch_put(
            keys=[f"{kwargs['uid']}_{kwargs['session_id']}_{index}" for index in range(len(rows))],
            tags=fingerprint_tags(rows, [len(one.prompt_ids) for one in outputs], self._stride),
            partition_id="train",
        )


class PSRLAgentLoopManager(AgentLoopManagerTQ):
    """Starts those workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PSRLAgentLoopWorker)
