"""One rank's part of an offline training: workers, batches, steps.

Shape legend: M targets of a rank's samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from psrl.config import PSRLConfig
from psrl.data import ReplaySample
from psrl.integrations.verl.local.actor_loss import make_actor_loss
from psrl.integrations.verl.local.metrics import mini_batch_metrics
from psrl.integrations.verl.local.replay_batch import ReplayBatch
from psrl.integrations.verl.local.supervised import supervised_batch, supervised_loss
from psrl.integrations.verl.local.worker import build_training_worker
from psrl.offline.options import OfflineOptions
from psrl.offline.processes import share_outputs
from psrl.offline.schedule import BatchRows, StepRows
from psrl.types import FloatArray


@dataclass(frozen=True)
class StepRecord:
    """What a step did, as the metrics file has it."""

    step: int
    epoch: int
    metrics: dict[str, float]
    """veRL's, of the whole mini-batch."""
    samples: int
    tokens: int
    """Of all ranks, before sharing."""
    unique_tokens: int | None
    """Tokens that were computed, of all ranks. None without sharing."""
    imbalance: float
    seconds: float


class Trainer:
    """The workers of this rank. Building one is collective, and so is every method."""

    def __init__(self, options: OfflineOptions, folder: Path, tokenizer_folder: Path, max_tokens: int, steps: int):
        """
        Args:
            folder: Hugging Face folder of the initial model.
            max_tokens: most tokens of a micro-batch.
            steps: optimizer steps of the whole training, for the learning rate.
        """
        self._options, self._max_tokens = options, max_tokens
        self._dtype = torch.float64 if options.dtype == "float64" else torch.float32

        def build(forward_only: bool) -> Any:
            return _build(options, folder, tokenizer_folder, max_tokens, steps, forward_only)

        self.worker = build(False)
        self._reference = build(True) if options.objective == "pg" and options.kl_coef > 0 else None
        self.worker.set_loss_fn(supervised_loss() if options.objective == "sft" else _policy_loss(options))

    @property
    def engine(self) -> Any:
        return self.worker.engine

    @property
    def reports(self) -> bool:
        """Whether this rank is the one that tells: the first replica's rank with outputs."""
        return self.engine.is_mp_src_rank_with_outputs() and self.engine.get_data_parallel_rank() == 0

    def train(self, rows: BatchRows, on_step: Callable[[StepRecord], None]) -> None:
        """The steps of a batch, in order. Weights change; ``on_step`` is called after each, on every rank (with metrics
        on the one that reports)."""
        rank = self.engine.get_data_parallel_rank()
        columns = [self._columns(step.ranks[rank]) for step in rows.steps] if self._options.objective == "pg" else None
        for index, step in enumerate(rows.steps):
            start = time.perf_counter()
            call = self._call(step, step.ranks[rank], None if columns is None else columns[index])
            output = self.worker.train_mini_batch(call)
            metrics = mini_batch_metrics(output, 1)[0] if self.reports else {}
            seconds = time.perf_counter() - start
            on_step(_record(step, metrics, self._unique_tokens(), seconds))

    def _unique_tokens(self) -> int | None:
        if self._options.sharing == "off":
            return None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        computed = torch.tensor(self.engine.last_report.stats.unique_tokens, device=device)
        torch.distributed.all_reduce(computed, group=self.engine.get_data_parallel_group())
        return int(computed)

    def _columns(self, samples: Sequence[ReplaySample]) -> dict[str, FloatArray]:
        """[M] old log-probs, recorded or of the weights before the batch, and the reference's if the loss has them."""
        batch = ReplayBatch(samples, dtype=self._dtype)
        old_M = self._log_probs(self.worker, batch)
        for index, sample in enumerate(samples):
            if sample.old_log_probs_M is not None:
                old_M[slice(*batch.cu_targets[index : index + 2])] = sample.old_log_probs_M
        columns = {"old_log_probs": old_M}
        if self._reference is not None:
            columns["ref_log_prob"] = self._log_probs(self._reference, batch)
        return columns

    def _log_probs(self, worker: Any, batch: ReplayBatch) -> FloatArray:
        call = batch.tensordict(
            max_tokens=self._max_tokens, temperature=1.0, calculate_entropy=False, compute_loss=False
        )
        output = worker.infer_batch(call)
        values = batch.targets_of(output["log_probs"]).double().cpu() if output is not None else None
        return share_outputs(worker.engine, values, int(batch.cu_targets[-1]), torch.float64).numpy().copy()

    def _call(self, step: StepRows, samples: Sequence[ReplaySample], columns_M: dict[str, FloatArray] | None) -> Any:
        """This rank's part of a step, for ``train_mini_batch``."""
        num_rows = sum(map(len, step.ranks))
        if columns_M is None:
            return supervised_batch(
                samples,
                max_tokens=self._max_tokens,
                seed=self._options.seed,
                num_samples=step.num_samples,
                num_rows=num_rows,
            )
        return ReplayBatch(samples, dtype=self._dtype).tensordict(
            max_tokens=self._max_tokens,
            temperature=1.0,
            calculate_entropy=self._options.entropy_coeff != 0,
            per_target=columns_M,
            global_batch_size=step.num_samples,
            mini_batch_size=num_rows,
            epochs=1,
            seed=self._options.seed,
            dataloader_kwargs={"shuffle": False},
        )


def _build(
    options: OfflineOptions, folder: Path, tokenizer_folder: Path, max_tokens: int, steps: int, forward_only: bool
) -> Any:
    layout = options.layout
    return build_training_worker(
        folder,
        dtype=options.dtype,
        psrl_config=PSRLConfig(enable=options.sharing == "on", kv_cache_bytes=options.kv_cache_bytes),
        max_tokens=max_tokens,
        lr=options.lr,
        recompute=None if options.recompute == "none" else options.recompute,
        forward_only=forward_only,
        seed=options.seed,
        quiet=False,  # the whole training is
        optimizer={"lr_warmup_steps": options.warmup, "total_training_steps": max(steps, options.warmup + 1)},
        model={"tokenizer_path": str(tokenizer_folder)},
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.tp > 1,
        use_distributed_optimizer=options.distributed_optimizer,
    )


def _policy_loss(options: OfflineOptions) -> Callable[..., Any]:
    return make_actor_loss(
        options.loss,
        options.effective_loss_agg_mode,
        loss_scale_factor=options.loss_scale_factor,
        entropy_coeff=options.entropy_coeff,
        kl_coef=options.kl_coef,
    )


def _record(step: StepRows, metrics: dict[str, float], unique_tokens: int | None, seconds: float) -> StepRecord:
    tokens = int(np.sum([sample.num_tokens for rank in step.ranks for sample in rank]))
    return StepRecord(step.step, step.epoch, metrics, step.num_samples, tokens, unique_tokens, step.imbalance, seconds)
