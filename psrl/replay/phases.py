"""The three phases of a replay on one side or on both, interleaved and timed.

Shape legend: M targets of all samples, in order.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from psrl.data import ReplaySample
from psrl.errors import InputError, LossError, MemoryBudgetError
from psrl.integrations.verl.local.metrics import mini_batch_metrics
from psrl.integrations.verl.local.replay_batch import ReplayBatch
from psrl.replay.clock import Seconds, now
from psrl.replay.options import ReplayOptions
from psrl.replay.progress import Progress
from psrl.replay.ranks import Ranks
from psrl.replay.shares import Share, share_of
from psrl.replay.side import Observation, Side, observed
from psrl.types import FloatArray

OLD_LOG_PROB, REF, UPDATE = "old_log_prob", "ref", "update"
PHASES = (OLD_LOG_PROB, REF, UPDATE)
_T = TypeVar("_T")


@dataclass
class PhaseRun:
    """One phase on one side: all repeats of it."""

    seconds: list[Seconds] = field(default_factory=list)
    """Of every repeat; of an update, of every step of every repeat."""
    planning_seconds: float = 0.0
    """Over all of them."""
    planning_wait_seconds: float = 0.0
    """Of these, those in which no pass ran."""
    peak_bytes: list[int] = field(default_factory=list)
    """Memory of the GPU that each of them needed beside weights, gradients and optimizer; empty without a GPU."""
    first: Observation = field(default_factory=Observation)
    """Of the first repeat (and step); its calls of the worker are added up."""
    outputs_M: dict[str, Tensor] = field(default_factory=dict)
    """First repeat of a forward-only phase: ``log_probs`` and, where computed, ``entropy``."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """veRL's metrics of every mini-batch of the first repeat's steps."""

    @property
    def median(self) -> Seconds:
        return Seconds(*(statistics.median(values) for values in zip(*self.seconds, strict=True)))


class PhaseRunner:
    """Runs phases in order: every repeat of a phase runs every side once, before the next phase begins."""

    def __init__(
        self,
        options: ReplayOptions,
        samples: Sequence[ReplaySample],
        sides: Sequence[Side],
        progress: Progress,
        ranks: Ranks,
    ) -> None:
        self._options, self.samples, self._sides, self._progress = options, samples, sides, progress
        self._ranks = ranks
        self._dtype = torch.float64 if options.dtype == "float64" else torch.float32
        self.cu_targets = np.cumsum([0, *(sample.num_targets for sample in samples)], dtype=np.int64)
        self._whole = _Call(self, slice(0, len(samples)), len(samples))
        self._mini_batch = min(options.mini_batch or len(samples), len(samples))
        num_full = len(samples) // self._mini_batch * self._mini_batch
        # The last mini-batch may be smaller; a call of the worker takes equal ones.
        self._parts = [
            _Call(self, part, min(self._mini_batch, part.stop - part.start))
            for part in (slice(0, num_full), slice(num_full, len(samples)))
            if samples[part]
        ]
        self.runs: dict[str, dict[str, PhaseRun]] = {
            phase: {side.name: PhaseRun() for side in sides} for phase in PHASES
        }

    @property
    def num_mini_batches(self) -> int:
        return sum(call.num_mini_batches for call in self._parts)

    def call_of(self, rows: slice, mini_batch: int) -> tuple[Share, ReplayBatch]:
        """This rank's part of a call of the worker."""
        dp_rank, dp_size = self._sides[0].dp_rank, self._options.parallel.dp
        share = share_of(self.samples, rows, mini_batch, self.cu_targets, dp_rank, dp_size)
        return share, ReplayBatch(share.samples, dtype=self._dtype)

    def sample_values(self) -> dict[str, Tensor]:
        """``log_probs.{row}`` and ``entropy.{row}`` of the old-log-prob phase, one value per target of the sample.

        Of the sharing side where both ran; so are the gradients.
        """
        outputs = self.runs[OLD_LOG_PROB][self._sides[0].name].outputs_M
        bounds = list(zip(self.cu_targets[:-1].tolist(), self.cu_targets[1:].tolist(), strict=True))
        return {
            f"{key}.{row}": values[start:end].clone()
            for key, values in outputs.items()
            for row, (start, end) in enumerate(bounds)
        }

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of the first mini-batch's loss by Hugging Face parameter name."""
        gradients = self.runs[UPDATE][self._sides[0].name].first.gradients
        assert gradients is not None
        return gradients

    def run(self) -> None:
        """All three phases. The actors' weights change in the last one."""
        self._interleave(OLD_LOG_PROB, lambda side, run: self._infer(OLD_LOG_PROB, side.actor, side, run))
        self._interleave(REF, lambda side, run: self._infer(REF, side.ref, side, run))
        self._interleave(UPDATE, self._update)

    def _interleave(self, phase: str, execute: Callable[[Side, PhaseRun], None]) -> None:
        for repeat in range(self._options.repeat):
            # Alternate who goes first, so that neither side always finds warm caches.
            order = self._sides if repeat % 2 == 0 else self._sides[::-1]
            for side in order:
                with self._progress.task(phase, side.name, repeat):
                    execute(side, self.runs[phase][side.name])

    # ------------------------------------------------------------------------------------------- forward-only phases
    def _infer(self, phase: str, worker: Any, side: Side, run: PhaseRun) -> None:
        share, rows = self._whole.share, self._whole.batch
        batch = rows.tensordict(
            max_tokens=side.max_tokens,
            temperature=self._options.temperature,
            calculate_entropy=phase == OLD_LOG_PROB,
            compute_loss=False,
        )
        with observed(worker, on_micro_batch=self._progress.micro_batch) as seen, _placed(share.samples, seen, None):
            start = now()
            output = worker.infer_batch(batch)
            _record(run, seen, now().minus(start))
        if run.outputs_M:
            return
        seen.reports = self._all_reports(side, seen)
        run.first = seen
        for key in ("log_probs", "entropy")[: 1 + (phase == OLD_LOG_PROB)]:
            values = None if output is None else rows.targets_of(output[key])
            run.outputs_M[key] = self._all_targets(share, values)
            self._check_outputs(key, run.outputs_M[key], side.name)

    def _all_targets(self, share: Share, values_m: Tensor | None) -> Tensor:
        """[M] values of all targets, from the ranks that have their share's. Collective."""
        whole = torch.empty(int(self.cu_targets[-1]), dtype=self._dtype)
        for part in self._ranks.gather(None if values_m is None else (share.targets_m, values_m)):
            if part is not None:
                whole[torch.from_numpy(part[0])] = part[1].to(self._dtype)
        return whole

    def _all_reports(self, side: Side, seen: Observation) -> list[Any]:
        """The reports of one rank of every data-parallel replica. Collective."""
        by_replica = dict(reversed(self._ranks.gather((side.dp_rank, seen.reports))))
        return [report for _, reports in sorted(by_replica.items()) for report in reports]

    # --------------------------------------------------------------------------------------------------------- update
    def _update(self, side: Side, run: PhaseRun) -> None:
        columns_M = self._update_columns(side.name)
        is_first_repeat = not run.seconds
        for step in range(self._options.steps):
            calls = [(call, self._update_call(side, call, columns_M)) for call in self._parts]
            whole = Observation()
            seconds = Seconds()
            for index, (call, batch) in enumerate(calls):
                with (
                    observed(
                        side.actor,
                        with_gradients=is_first_repeat and step == 0 and index == 0,
                        on_micro_batch=self._progress.micro_batch,
                    ) as seen,
                    _placed(call.share.samples, seen, call.rows_per_mini_batch),
                ):
                    start = now()
                    output = side.actor.train_mini_batch(batch)
                    seconds = seconds.plus(now().minus(start).minus(seen.excluded))
                _add(whole, seen)
                metrics = self._first_output(
                    None if output is None else mini_batch_metrics(output, call.num_mini_batches)
                )
                self._check_update(self.samples[call.rows], metrics, seen, side.name)
                if is_first_repeat:
                    run.metrics += metrics
            _record(run, whole, seconds)
            if is_first_repeat and step == 0:
                whole.reports = self._all_reports(side, whole)
                run.first = whole

    def _first_output(self, value: _T | None) -> _T:
        """What the first rank that has outputs made of them. Collective."""
        return next(x for x in self._ranks.gather(value) if x is not None)

    def _check_outputs(self, key: str, values_M: Tensor, side: str) -> None:
        bad = torch.nonzero(~values_M.isfinite())
        if len(bad):
            target = int(bad[0])
            sample = int(np.searchsorted(self.cu_targets, target, side="right")) - 1
            raise InputError(
                f"{self.samples[sample].where}: {key} of target {target - int(self.cu_targets[sample])} is not finite "
                f"({float(values_M[target])}, {side}): the model's weights or --temperature overflow in "
                f"{self._options.dtype}"
            )

    def _check_update(
        self, samples: Sequence[ReplaySample], metrics: list[dict[str, float]], seen: Observation, side: str
    ) -> None:
        for index, values in enumerate(metrics):
            if not math.isfinite(values.get("loss", 0.0)):
                raise LossError(
                    f"{samples[index * self._mini_batch].where}: the loss of the mini-batch that begins here is not "
                    f"finite ({values['loss']}, {side})"
                )
        for name, gradient in (seen.gradients or {}).items():
            if not gradient.isfinite().all():
                raise LossError(
                    f"{samples[0].where}: the gradient of {name} is not finite in the mini-batch that begins here "
                    f"({side})"
                )

    def _update_columns(self, side: str) -> dict[str, FloatArray]:
        """[M] old log-probs, given or computed by this side, and the reference's where the loss wants them."""
        columns = {"old_log_probs": self.runs[OLD_LOG_PROB][side].outputs_M["log_probs"].double().numpy().copy()}
        for index, sample in enumerate(self.samples):
            if sample.old_log_probs_M is not None:
                targets = slice(*self.cu_targets[index : index + 2])
                columns["old_log_probs"][targets] = sample.old_log_probs_M
        if self._options.kl_coef > 0:
            columns["ref_log_prob"] = self.runs[REF][side].outputs_M["log_probs"].double().numpy()
        return columns

    def _update_call(self, side: Side, call: _Call, columns_M: dict[str, FloatArray]) -> TensorDict:
        return call.batch.tensordict(
            max_tokens=side.max_tokens,
            temperature=self._options.temperature,
            calculate_entropy=self._options.entropy_coeff != 0,
            per_target={key: values[call.share.targets_m] for key, values in columns_M.items()},
            global_batch_size=call.mini_batch,
            mini_batch_size=call.share.num_padded,
            epochs=1,
            seed=self._options.seed,
            dataloader_kwargs={"shuffle": False},
        )


class _Call:
    """Rows of one call of the worker, cut into mini-batches of one size, and this rank's share of them."""

    def __init__(self, runner: PhaseRunner, rows: slice, mini_batch: int) -> None:
        self.rows, self.mini_batch = rows, mini_batch
        self.num_mini_batches = max(1, (rows.stop - rows.start) // max(1, mini_batch))
        self._runner = runner

    @cached_property
    def _part(self) -> tuple[Share, ReplayBatch]:
        return self._runner.call_of(self.rows, self.mini_batch)

    @property
    def share(self) -> Share:
        return self._part[0]

    @property
    def batch(self) -> ReplayBatch:
        return self._part[1]

    @property
    def rows_per_mini_batch(self) -> int:
        return len(self.share.samples) // self.num_mini_batches


@contextlib.contextmanager
def _placed(samples: Sequence[ReplaySample], seen: Observation, mini_batch: int | None) -> Iterator[None]:
    """Errors of a call of the worker on ``samples`` name the place in the file, and options as they are written.

    Args:
        mini_batch: samples of each mini-batch of the call; None: one for all.
    """
    try:
        yield
    except (MemoryBudgetError, LossError) as error:
        first = len(seen.reports) * (mini_batch or 0)
        sample = samples[first + (getattr(error, "sample", None) or 0)]
        message = str(error)
        for name in ("kv_cache_bytes", "kv_host_bytes", "max_tokens"):
            message = message.replace(f"psrl.{name}", "--" + name.replace("_", "-"))
        raise type(error)(f"{sample.where}: {message}") from error


def _record(run: PhaseRun, seen: Observation, seconds: Seconds) -> None:
    run.seconds.append(seconds)
    run.planning_seconds += sum(report.planning_seconds for report in seen.reports)
    run.planning_wait_seconds += sum(report.planning_wait_seconds for report in seen.reports)
    if seen.peak_bytes is not None:
        run.peak_bytes.append(seen.peak_bytes)


def _add(whole: Observation, seen: Observation) -> None:
    whole.reports += seen.reports
    whole.forwards += seen.forwards
    if seen.peak_bytes is not None:
        whole.peak_bytes = max(seen.peak_bytes, whole.peak_bytes or 0)
    if whole.gradients is None:
        whole.gradients = seen.gradients
