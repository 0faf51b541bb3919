"""One side of a replay: an actor and a reference worker, sharing or not, and what is observed of their engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from psrl.config import PSRLConfig
from psrl.integrations.verl.engine.export import full_grads
from psrl.integrations.verl.local.actor_loss import make_actor_loss
from psrl.integrations.verl.local.worker import build_training_worker
from psrl.replay.clock import PeakMemory, Seconds, now
from psrl.replay.model import ReplayModel
from psrl.replay.options import ReplayOptions

SHARED, UNSHARED = "shared", "unshared"


@dataclass
class Observation:
    """What one call of a worker did, beyond what it returned."""

    reports: list[Any] = field(default_factory=list)
    """The engine's report of every mini-batch (empty without sharing)."""
    forwards: int = 0
    """Forwards of the model. With sharing, a spine micro-batch of an update has two."""
    gradients: dict[str, Tensor] | None = None
    """Of the first mini-batch, where asked for: unscaled, before clipping, by Hugging Face name."""
    excluded: Seconds = field(default_factory=Seconds)
    """Time of the call that went into observing it."""
    peak_bytes: int | None = None
    """Memory of the GPU that the call needed beside what was there; None without a GPU."""


@dataclass
class Side:
    name: str
    """``shared`` or ``unshared``; in a benchmark the name of the system."""
    actor: Any
    ref: Any
    max_tokens: int

    @property
    def dp_rank(self) -> int:
        return self.actor.engine.get_data_parallel_rank()


def build_side(name: str, options: ReplayOptions, model: ReplayModel, max_tokens: int) -> Side:
    """Build both workers of a side on the checkpoint, with equal weights.

    Args:
        name: ``unshared``, or anything else for a side that shares as ``options.system``.
        max_tokens: most tokens of a micro-batch on a context-parallel rank.
    """
    config = PSRLConfig(
        enable=name != UNSHARED,
        max_tokens=max_tokens,
        infer_max_tokens=max_tokens,
        kv_cache_bytes=options.kv_cache_bytes,
        kv_host_bytes=options.kv_host_bytes,
        kv_recompute=options.kv_recompute,
        attention_backend=options.attention_of(shares=name != UNSHARED),
    )

    parallel = options.parallel

    def build(forward_only: bool) -> Any:
        return build_training_worker(
            model.folder,
            dtype=options.dtype,
            psrl_config=config,
            max_tokens=max_tokens,
            lr=options.lr,
            recompute=None if options.recompute == "none" else options.recompute,
            forward_only=forward_only,
            seed=options.seed,
            quiet=False,  # the whole job is
            model={"tokenizer_path": str(model.tokenizer_folder)},
            sharing_system=options.system,
            vanilla_mbridge=True,  # needs no TransformerEngine
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1 if parallel.ep > 1 else None,  # whole experts, or split like the rest
        )

    actor = build(forward_only=False)
    actor.set_loss_fn(
        make_actor_loss(
            options.loss,
            options.effective_loss_agg_mode,
            loss_scale_factor=options.loss_scale_factor,
            entropy_coeff=options.entropy_coeff,
            kl_coef=options.kl_coef,
        )
    )
    return Side(name, actor, build(forward_only=True), max_tokens)


@contextlib.contextmanager
def observed(
    worker: Any, *, with_gradients: bool = False, on_micro_batch: Callable[[int], None] | None = None
) -> Iterator[Observation]:
    """Watch the worker's engine for the duration of one call.

    Args:
        with_gradients: export the first mini-batch's gradient, between its backward and the optimizer step.
        on_micro_batch: called with the number of forwards so far.
    """
    engine, seen, memory = worker.engine, Observation(), PeakMemory()
    run_batch, optimizer_step = engine.forward_backward_batch, engine.optimizer_step

    def counted(*_: Any) -> None:
        seen.forwards += 1
        if on_micro_batch is not None:
            on_micro_batch(seen.forwards)

    def reported(*args: Any, **kwargs: Any) -> Any:
        output = run_batch(*args, **kwargs)
        if engine.psrl_config.enable:
            seen.reports.append(engine.last_report)
        return output

    def exported(*args: Any, **kwargs: Any) -> Any:
        if with_gradients and seen.gradients is None:
            start = now()
            memory.pause()
            seen.gradients = {name: grad.cpu() for name, grad in full_grads(engine).items()}
            memory.resume()
            seen.excluded = seen.excluded.plus(now().minus(start))
        return optimizer_step(*args, **kwargs)

    hook = engine.module[0].register_forward_pre_hook(counted)
    engine.forward_backward_batch, engine.optimizer_step = reported, exported
    try:
        yield seen
        seen.peak_bytes = memory.stop()
    finally:
        hook.remove()
        del engine.forward_backward_batch, engine.optimizer_step
