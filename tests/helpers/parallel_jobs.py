"""Jobs beside ``run_job`` for the ranks of a layout."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from verl.utils import tensordict_utils as tu

from tests.helpers.engines import at_targets
from tests.helpers.parallel import Job, Layout, rank_batch, rank_worker


def log_probs_of_base(job: Job, layout: Layout) -> tuple[int, list[torch.Tensor] | None]:
    """This rank's rows through a model without its adapters, as upstream's trainer asks for the reference. None on
    stages without outputs."""
    worker = rank_worker(job, layout, job.engine)
    dp_rank = mpu.get_data_parallel_rank()
    batch = rank_batch(job, job.shares[dp_rank], job.budgets[0])
    tu.assign_non_tensor(batch, no_lora_adapter=True)
    inferred = worker.infer_batch(batch)
    return dp_rank, None if inferred is None else at_targets(inferred["log_probs"], job.shares[dp_rank])


def save_and_resume(job: Job, layout: Layout, folder: str) -> dict[str, float]:
    """A step, a checkpoint, a step; then the checkpoint in a fresh worker, and the step again. Returns the largest
    differences of what is trained to the first time; ``moved``: of the fresh worker, before it has loaded; ``weights``:
    with the weights of the checkpoint alone."""

    def step(worker: Any) -> None:
        worker.train_mini_batch(rank_batch(job, job.shares[mpu.get_data_parallel_rank()], job.budgets[0]))

    def trained(worker: Any) -> list[torch.Tensor]:
        chunks = worker.engine.module
        return [p.detach().clone() for chunk in chunks for p in chunk.parameters() if p.requires_grad]

    def difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
        return max((float((a - b).abs().max()) for a, b in zip(some, others, strict=True)), default=0.0)

    multiprocessing.current_process().daemon = False  # Megatron-Core writes with the help of a process
    worker = rank_worker(job, layout, job.engine)
    step(worker)
    saved = trained(worker)
    worker.save_checkpoint(folder, global_step=1)
    step(worker)
    continued = trained(worker)
    worker = rank_worker(job, layout, job.engine)
    moved = difference(trained(worker), saved)
    contents = worker.engine.checkpoint_mananager.checkpoint_load_contents
    found = {"moved": moved}
    for name, loaded in (("weights", ["model"]), ("loaded", contents)):
        worker.engine.checkpoint_mananager.checkpoint_load_contents = loaded
        worker.load_checkpoint(folder)
        found[name] = difference(trained(worker), saved)
    step(worker)
    return {**found, "continued": difference(trained(worker), continued)}


def infer_and_train(job: Job, layout: Layout) -> tuple[int, tuple[list[torch.Tensor], float, float] | None]:
    """The calls of upstream's worker on this rank's rows: log-probs of every row, then the loss and the norm of the
    gradient of one step. None on stages without outputs."""
    worker = rank_worker(job, layout, job.engine)
    dp_rank = mpu.get_data_parallel_rank()
    rows, budget = job.shares[dp_rank], job.budgets[0]
    inferred = worker.infer_batch(rank_batch(job, rows, budget))
    trained = worker.train_batch(rank_batch(job, rows, budget))
    if inferred is None:
        return dp_rank, None
    metrics = tu.get(trained, "metrics")
    return dp_rank, (at_targets(inferred["log_probs"], rows), metrics["loss"], metrics["grad_norm"])
