"""Running a plan through Megatron's stock schedules: pass 1, then pass 2, wave by wave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from psrl.integrations.megatron.packed import SharedPrefixParams
from psrl.runtime.session import BoundMicroBatch, Execution, Session, forwarding

OnOutput = Callable[[BoundMicroBatch, Tensor, bool], Tensor]
"""Called on the last stage with a micro-batch, the output layer's rows [1, R, columns] and whether a backward follows.
Returns the scalar to differentiate (ignored without a backward)."""


def run_plan(session: Session, chunks: Sequence[nn.Module], on_output: OnOutput) -> None:
    """Run every wave of the session's plan. Adds to the parameters' gradients unless the plan is forward only.

    Gradients accumulate over waves; they are synchronised and finalised once, in the last one.

    Args:
        chunks: this rank's model chunks (one per virtual pipeline stage), as the engine holds them.

    Raises:
        PlanError: KV blocks are left at the end.
    """
    config = get_model_config(chunks[0])
    waves = session.plan.waves
    for index, wave in enumerate(waves):
        if wave.pass1:
            with torch.no_grad():
                _run_schedule(session, chunks, wave.pass1, on_output, backward=False)
        if wave.pass2:
            with contextlib.nullcontext() if index == len(waves) - 1 else _without_grad_sync(config, chunks):
                _run_schedule(session, chunks, wave.pass2, on_output, backward=True)
    session.cache.check_drained()


def _run_schedule(
    session: Session, chunks: Sequence[nn.Module], order: Sequence[int], on_output: OnOutput, *, backward: bool
) -> None:
    executions = [session.execution(index, backward=backward) for index in order]
    iterators = [iter(executions) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, on_output=on_output, num_micro_batches=len(order)),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(order),
        seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not backward,
    )


def _forward_step(
    executions: Iterator[Execution], model: nn.Module, *, on_output: OnOutput, num_micro_batches: int
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Any]]]]:
    execution = next(executions)
    micro_batch = execution.micro_batch
    with forwarding(micro_batch):
        output = model(
            input_ids=micro_batch.token_ids_T.unsqueeze(0),
            position_ids=micro_batch.position_ids_T.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=SharedPrefixParams.of(execution),
        )

    def loss_function(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        # The schedule divides by the number of micro-batches.
        return on_output(micro_batch, output, execution.backward) * num_micro_batches, {}

    return output, loss_function


@contextlib.contextmanager
def _without_grad_sync(config: Any, chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Accumulate gradients without synchronising or finalising them, the last micro-batch included.

    The schedules run their last micro-batch outside ``no_sync_func``, so that is replaced for the time.
    """
    finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func, config.no_sync_func = None, contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            chunk_no_sync = getattr(chunk, "no_sync", None)
            if chunk_no_sync is not None:
                stack.enter_context(chunk_no_sync())
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync


def vocab_shard_group() -> Any:
    """Tensor-parallel group over which the vocabulary is split, None for a single rank."""
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None
