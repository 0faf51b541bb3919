"""One job on every rank of a layout, and the single process without sharing that it is compared with."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.batches import Row, batch_tensordict
from tests.helpers.engines import at_targets


@dataclass(frozen=True)
class Layout:
    """Sizes by axis; what is left of the processes is data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    def engine_fields(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }


@dataclass(frozen=True)
class Job:
    checkpoint: str
    shares: Sequence[Sequence[Row]]
    """Rows of every data-parallel rank, equally many each."""
    budgets: Sequence[int] = (5, 1000)
    dtype: str = "float64"
    loss: tuple[Callable[..., Any], dict[str, Any]] | None = None
    """Factory of the loss and its keywords; None: PPO with an entropy term."""
    model_type: str = "language_model"
    sharing: bool = True
    adam: bool = True
    """Also two steps of Adam with the first budget."""
    kv_share: float | None = None
    """Budget of the cache, as a share of what the plan wants. None: no limit."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further keywords of ``build_training_worker``."""
    psrl: dict[str, Any] = field(default_factory=dict)
    """Further settings of the side that shares."""
    lr: float = 1e-2
    expert_bias: bool = False
    """The checkpoint has biases of routers (``EXPERT_BIAS``); they are exported among the gradients."""
    record: bool = False
    """Also record the routes of the rows, in a forward with the first budget."""

    @property
    def rows(self) -> list[Row]:
        return [row for share in self.shares for row in share]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class RankResult:
    dp_rank: int
    outputs: dict[int, dict[str, list[torch.Tensor]]]
    """By budget and kind, per row; empty on stages without outputs."""
    losses: dict[int, float]
    grads: dict[int, dict[str, torch.Tensor]]
    """By budget, merged; rank 0 only, as are weights."""
    weights: dict[str, torch.Tensor]
    reports: dict[int, Any]
    router_losses: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By budget: what Megatron-Core logs of experts' losses, per layer; parts of it on tensor-parallel ranks."""
    routes: list[torch.Tensor] = field(default_factory=list)
    """Recorded, per row; empty on stages without outputs."""


def run_job(job: Job, layout: Layout) -> RankResult:
    """Run ``job`` as this rank of ``layout``."""
    with _expert_bias_mapped(job.expert_bias):
        return _run(job, rank_worker(job, layout, job.engine))


def _destroy_groups() -> None:
    """End the groups of the layout before: Megatron-Core forgets them only, and each has threads that poll."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gc.collect()  # engines that hold them
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _run(job: Job, worker: Any) -> RankResult:
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    engine = worker.engine
    dp_rank = mpu.get_data_parallel_rank()
    rows = job.shares[dp_rank]
    result = RankResult(dp_rank, {}, {}, {}, {}, {})
    for budget in job.budgets:
        clear_aux_losses_tracker()
        _update(worker, job, rows, budget, result)
        tracked = get_moe_layer_wise_logging_tracker()
        result.router_losses[budget] = {name: entry["values"].clone() for name, entry in tracked.items()}
    if job.record:
        _record(engine, job, rows, result)
    if job.kv_share is not None:
        budget = job.budgets[0]
        limit = int(result.reports[budget].stats.kv_bytes_peak * job.kv_share)
        object.__setattr__(engine.engine_config.psrl, "kv_cache_bytes", limit)
        _update(worker, job, rows, budget, result, key=-1)
        object.__setattr__(engine.engine_config.psrl, "kv_cache_bytes", None)
    if job.adam:
        _two_steps(worker, job, rows, result)
    return result


@contextlib.contextmanager
def _expert_bias_mapped(enabled: bool) -> Iterator[None]:
    """mbridge knows the name of a router's bias for DeepSeek-V3 only."""
    if not enabled:
        yield
        return
    from mbridge.models.qwen2moe import Qwen2MoEBridge

    from tests.helpers.checkpoints import EXPERT_BIAS

    names = dict(Qwen2MoEBridge._MLP_MAPPING)
    Qwen2MoEBridge._MLP_MAPPING = {"mlp.router.expert_bias": [EXPERT_BIAS], **names}
    try:
        yield
    finally:
        Qwen2MoEBridge._MLP_MAPPING = names


def rank_worker(job: Job, layout: Layout, engine: dict[str, Any]) -> Any:
    """Replaces the process's model-parallel groups."""
    from megatron.core import parallel_state as mpu

    from psrl.config import PSRLConfig
    from psrl.integrations.verl.local.worker import build_training_worker
    from tests.helpers.adapters import fill_adapters
    from tests.helpers.megatron_bridge import import_megatron_bridge
    from tests.helpers.workers import ppo_loss_fn

    if not engine.get("vanilla_mbridge", True):
        import_megatron_bridge()
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        _destroy_groups()
    worker = build_training_worker(
        job.checkpoint,
        psrl_config=PSRLConfig(enable=job.sharing, **{"attention_backend": "sdpa", **job.psrl}),
        dtype=job.dtype,
        max_tokens=1024,
        lr=job.lr,
        model_type=job.model_type,
        **layout.engine_fields(),
        **engine,
    )
    factory, keywords = job.loss or (ppo_loss_fn, {"entropy_coeff": 0.1})
    worker.set_loss_fn(factory(**keywords))
    if job.model_type == "value_model":
        _fill_head(worker.engine)
    if worker.engine.peft_cls is not None:
        fill_adapters(worker.engine)
    return worker


def _fill_head(engine: Any) -> None:
    """The same value head on every layout: upstream draws it with the seed of the pipeline stage."""
    from verl.utils.megatron_utils import unwrap_model

    for chunk in map(unwrap_model, engine.module):
        if chunk.post_process:
            weight = chunk.output_layer.weight
            with torch.no_grad():
                weight.copy_(torch.linspace(-0.3, 0.4, weight.numel(), dtype=weight.dtype).view_as(weight))
    engine.optimizer.reload_model_params()


def rank_batch(job: Job, rows: Sequence[Row], budget: int) -> Any:
    """This rank's rows, as the dispatcher hands them out: sizes of the batch are global."""
    batch = batch_tensordict(
        rows,
        dtype=job.torch_dtype,
        max_tokens=budget,
        global_batch_size=len(job.rows),
        calculate_entropy=job.model_type == "language_model",
    )
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(batch, mini_batch_size=len(job.rows))
    return batch


def _update(worker: Any, job: Job, rows: Sequence[Row], budget: int, result: RankResult, key: int | None = None):
    from psrl.integrations.verl.engine.export import full_grads
    from tests.helpers.adapters import adapter_grads

    engine, key = worker.engine, budget if key is None else key
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(rank_batch(job, rows, budget), worker.loss_fn, forward_only=False)
        grads = full_grads(engine) if engine.peft_cls is None else adapter_grads(engine)
    if torch.distributed.get_rank() == 0:
        result.grads[key] = {name: grad.clone() for name, grad in grads.items()}
    result.reports[key] = engine.last_report
    if "model_output" in output:
        result.outputs[key] = {kind: at_targets(value, rows) for kind, value in output["model_output"].items()}
        result.losses[key] = float(sum(output["loss"]))


def _record(engine: Any, job: Job, rows: Sequence[Row], result: RankResult) -> None:
    from verl.utils import tensordict_utils as tu

    from tests.helpers.routes import without_routes

    batch = rank_batch(job, without_routes(rows), job.budgets[0])
    tu.assign_non_tensor(batch, enable_routing_replay=True)
    with engine.eval_mode():
        output = engine.infer_batch(batch)
    if "model_output" in output:
        result.routes = list(output["model_output"]["routed_experts"].unbind())


def _two_steps(worker: Any, job: Job, rows: Sequence[Row], result: RankResult) -> None:
    for _ in range(2):
        worker.train_mini_batch(rank_batch(job, rows, job.budgets[0]))
    engine = worker.engine
    weights = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
    if engine.peft_cls is not None:  # as a rollout gets them that has the base already
        weights |= {name: value.clone() for name, value in engine.get_per_tensor_param(base_sync_done=True)[0]}
    if torch.distributed.get_rank() == 0:
        result.weights = weights


@functools.cache
def _reference_cache() -> dict[Any, RankResult]:
    return {}


def _model_options(engine: dict[str, Any]) -> dict[str, Any]:
    """What changes the loss, without what belongs to a layout."""
    options = engine.get("override_transformer_config", {})
    kept = {name: value for name, value in options.items() if "pipeline_stage" not in name}
    names = ("router_replay", "model", "vanilla_mbridge") if "model" in engine else ("router_replay",)
    model = {name: engine[name] for name in names if name in engine}
    return {**model, "override_transformer_config": kept} if kept else model


def reference(job: Job, key: str) -> RankResult:
    """All rows in this one process, without sharing, as one micro-batch; computed once per ``key``."""
    known = _reference_cache()
    if key not in known:
        alone = Job(
            job.checkpoint,
            [job.rows],
            budgets=(4096,),
            dtype=job.dtype,
            loss=job.loss,
            model_type=job.model_type,
            sharing=False,
            adam=job.adam,
            lr=job.lr,
            engine=_model_options(job.engine),
            expert_bias=job.expert_bias,
            record=job.record,
        )
        known[key] = run_job(alone, Layout())
    return known[key]
