"""Running a plan through Megatron's stock schedules: pass 1, then pass 2, wave by wave."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from psrl.errors import OutOfMemoryError
from psrl.integrations.megatron.lockstep import align_waves
from psrl.integrations.megatron.packed import SharedPrefixParams
from psrl.runtime.context import ContextRank
from psrl.runtime.session import BoundMicroBatch, Execution, Session, forwarding
from psrl.types import ExecutionPlan

OnOutput = Callable[[BoundMicroBatch, Tensor, bool], Tensor]
"""Called on the last stage with a micro-batch, the output layer's rows [1, R, columns] and whether a backward follows.
Returns the scalar to differentiate (ignored without a backward)."""


def run_plan(session: Session, chunks: Sequence[nn.Module], on_output: OnOutput) -> None:
    """Run every wave of the session's plan. Adds to the parameters' gradients unless the plan is forward only.

    Gradients accumulate over waves; they are synchronised and finalised once, in the last one. Collective over ranks
    that share a plan and, with experts spread over data-parallel ranks, over those too.

    Args:
        chunks: this rank's model chunks (one per virtual pipeline stage), as the engine holds them.

    Raises:
        OutOfMemoryError: an allocation failed; with any error, the session's caches are empty afterwards.
        PlanError: KV blocks are left at the end.
    """
    try:
        _run_waves(session, chunks, on_output)
    except BaseException as error:
        session.close()
        if is_out_of_memory(error):
            raise out_of_memory(session.plan, error) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate, on a GPU or on the CPU, whose allocator has no error of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def out_of_memory(plan: ExecutionPlan, error: BaseException) -> OutOfMemoryError:
    """The error with what the plan needs and what to change."""
    kind, stats = ("infer_max_tokens" if plan.forward_only else "max_tokens"), plan.stats
    kept, switch = "", ""
    if stats.attention_bytes:
        kept = f", attention's results between the passes {stats.attention_bytes:,}"
        switch = "psrl.keep_attention=false, "
    return OutOfMemoryError(
        f"out of memory while a plan of {stats.unique_tokens:,} tokens ran: cached K/V and gradients take up to "
        f"{stats.kv_bytes_peak:,} bytes of it on the device{kept}; the rest is activations of up to "
        f"{plan.max_tokens:,} tokens, logits, and what else is there. Set {switch}psrl.kv_cache_bytes below "
        f"{stats.kv_bytes_peak:,}, lower psrl.{kind}, or set psrl.max_logit_rows ({error})"
    )


def _run_waves(session: Session, chunks: Sequence[nn.Module], on_output: OnOutput) -> None:
    config = get_model_config(chunks[0])
    waves = align_waves(
        session.plan.waves,
        forward_only=session.plan.forward_only,
        multiple=config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1,
        group=expert_lockstep_group(),
        device=session.device,
    )
    for index, wave in enumerate(waves):
        is_last = index == len(waves) - 1
        if wave.pass1:
            with torch.no_grad():
                _run_schedule(session, chunks, wave.pass1, on_output, backward=False, is_last=False)
        if wave.pass2:
            with contextlib.nullcontext() if is_last else _without_grad_sync(config, chunks):
                _run_schedule(session, chunks, wave.pass2, on_output, backward=True, is_last=is_last)
    session.check_drained()


def expert_lockstep_group() -> Any:
    """Data-parallel ranks over which experts are spread, so that they run in step; None where they are not."""
    if mpu.get_expert_model_parallel_world_size() == 1:
        return None
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _run_schedule(
    session: Session,
    chunks: Sequence[nn.Module],
    order: Sequence[int],
    on_output: OnOutput,
    *,
    backward: bool,
    is_last: bool,
) -> None:
    per_token = get_model_config(chunks[0]).calculate_per_token_loss and backward
    cp = mpu.get_context_parallel_world_size()
    # The schedule scales auxiliary losses as it does the loss that ``_forward_step`` returns, by a float32 number.
    router_scale = cp if per_token else cp / float(np.float32(cp) / np.float32(len(order)))
    iterators = [
        iter([session.execution(index, chunk=chunk, backward=backward, router_scale=router_scale) for index in order])
        for chunk in range(len(chunks))
    ]
    weights = itertools.chain([int(is_last)], itertools.repeat(0)) if per_token else None
    get_forward_backward_func()(
        forward_step_func=partial(
            _forward_step, on_output=on_output, num_micro_batches=len(order), token_counts=weights
        ),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(order),
        seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not backward,
    )


def _forward_step(
    executions: Iterator[Execution],
    model: nn.Module,
    *,
    on_output: OnOutput,
    num_micro_batches: int,
    token_counts: Iterator[int] | None,
) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
    execution = next(executions)
    micro_batch = execution.micro_batch
    with forwarding(micro_batch):
        output = model(
            input_ids=micro_batch.token_ids_T.unsqueeze(0),
            position_ids=micro_batch.position_ids_T.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=SharedPrefixParams.of(execution),
        )

    def loss_function(output: Tensor) -> tuple[Any, ...]:
        # A dummy has no outputs, but its backward has to run through all stages.
        loss = 0.0 * output.sum() if micro_batch.is_dummy else on_output(micro_batch, output, execution.backward)
        if token_counts is None:
            return loss * num_micro_batches, {}  # the schedule multiplies by cp and divides by their number
        # Per-token loss: gradients are summed over ranks and divided by the sum of what ranks return as their number
        # of tokens. One in all from each of the dp x cp ranks gives the average that veRL's losses are scaled for.
        num_tokens = torch.tensor(next(token_counts), dtype=torch.int, device=output.device)
        return loss * mpu.get_context_parallel_world_size(), num_tokens, {}

    return output, loss_function


@contextlib.contextmanager
def _without_grad_sync(config: Any, chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Accumulate gradients without synchronising or finalising them, the last micro-batch included.

    The schedules run their last micro-batch outside ``no_sync_func`` and then call ``grad_sync_func``, so both are
    replaced for the time.
    """
    finalize, no_sync, grad_sync = config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func
    config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func = None, contextlib.nullcontext, None
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            chunk_no_sync = getattr(chunk, "no_sync", None)
            if chunk_no_sync is not None:
                stack.enter_context(chunk_no_sync())
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync
            config.grad_sync_func = grad_sync


def vocab_shard_group() -> Any:
    """Tensor-parallel group over which the vocabulary is split, None for a single rank."""
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None


def context_rank() -> ContextRank | None:
    """This rank among those that share its micro-batches' tokens, None where it is alone."""
    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return None
    group: Any = mpu.get_context_parallel_group()
    return ContextRank(group, mpu.get_context_parallel_rank(), size)


def token_multiple(config: Any) -> int:
    """What micro-batches are padded to a multiple of, so that ranks get equal shares.

    Megatron's rotary embedding wants an even number of tokens on a context-parallel rank.
    """
    context = config.context_parallel_size
    return (config.tensor_model_parallel_size if config.sequence_parallel else 1) * (1 if context == 1 else 2 * context)


def shared_plan_group() -> Any:
    """Ranks of a pipeline stage that hold parts of the same micro-batches, None for a single rank."""
    group: Any = mpu.get_tensor_and_context_parallel_group()
    return group if group.size() > 1 else None


def replica_groups() -> list[Any]:
    """Groups of more than one rank that together hold one replica: its stages, and those that split its tokens."""
    groups: list[Any] = [mpu.get_model_parallel_group(), mpu.get_context_parallel_group()]
    return [group for group in groups if group.size() > 1]
