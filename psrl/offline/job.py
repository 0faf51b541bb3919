"""The offline training: read, check, build, resume, train, save. Every process runs it; rank 0 alone writes files that
belong to no rank."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from psrl.data import ReplaySample, load_samples, load_tokenizer
from psrl.data.samples import check_vocabulary
from psrl.data.tokenizer import ChatTokenizer, load_model_tokenizer
from psrl.errors import InputError
from psrl.integrations.verl.compat import quiet_upstream
from psrl.models import NAMED_MODELS, named_model_folder
from psrl.offline.export import check_out, tokenizer_source, write_model
from psrl.offline.options import OfflineOptions
from psrl.offline.schedule import batches, num_steps
from psrl.replay.checkpoint import check_weights
from psrl.replay.model import check_model_folder, make_placeholder_tokenizer, make_random_model, vocabulary_for
from psrl.replay.options import TINY_MODELS

if TYPE_CHECKING:
    from psrl.offline.processes import Processes
    from psrl.offline.training import StepRecord, Trainer


@dataclass(frozen=True)
class OfflineReport:
    """What a training did."""

    num_samples: int
    num_targets: int
    steps: list[StepRecord]
    """Of this process's part of the training. Their metrics are empty on ranks that have none."""


def run_offline(options: OfflineOptions, say: Callable[[str], None] | None = None) -> OfflineReport:
    """Train. In a process that ``torchrun`` started, as one of its ranks; else alone.

    Args:
        say: takes a line of text at the start and after every step, on the rank that has metrics; by default it is
            printed.

    Raises:
        PSRLError: the input, the model or an option is not usable, or another rank is gone; the message is for the
            user.
    """
    options.layout.data_parallel_size(int(os.environ.get("WORLD_SIZE", "1")))
    if options.out is not None:
        check_out(options.out)
    folder = _model_folder(options.model)
    vocab_size = None if folder is None else check_model_folder(str(folder))
    samples = _read_samples(options, folder)
    if vocab_size is not None:
        check_vocabulary(samples, vocab_size, options.model)
    stdout = sys.stdout

    def printed(line: str) -> None:
        print(f"psrl: {line}", file=stdout, flush=True)

    with quiet_upstream():
        import psrl.offline.training  # noqa: F401  (torch and the upstreams: seconds, after the checks)
    with quiet_upstream():  # again: it reaches the log handlers that exist when it begins
        from psrl.offline.processes import joined

        with joined(options.timeout) as processes, tempfile.TemporaryDirectory(prefix="psrl_offline_") as scratch:
            steps = _Job(options, folder, samples, Path(scratch), processes, say or printed).run()
    return OfflineReport(len(samples), sum(sample.num_targets for sample in samples), steps)


class _Job:
    """One process's part."""

    def __init__(
        self,
        options: OfflineOptions,
        folder: Path | None,
        samples: Sequence[ReplaySample],
        scratch: Path,
        processes: Processes,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._samples, self._processes, self._say = options, samples, processes, say
        make_placeholder_tokenizer(scratch / "tokenizer")
        self._tokenizer_folder = scratch / "tokenizer"
        if folder is None:
            folder = scratch / "model"
            _random_model(options, samples, folder)
        else:
            check_weights(folder)
        self._folder = folder

    def run(self) -> list[StepRecord]:
        from psrl.offline.checkpoints import Checkpoints

        options = self._options
        num_ranks = options.layout.data_parallel_size(self._processes.world_size)
        rows_per_step, batch = options.rows_per_step, options.batch
        total = num_steps(len(self._samples), rows_per_step, batch, options.epochs, options.steps)
        trainer = self._trainer(total)
        checkpoints = Checkpoints(options, trainer.worker, self._processes, self._say)
        last = checkpoints.resume()
        self._greet(trainer, num_ranks, total, last)

        done: list[StepRecord] = []

        def on_step(record: StepRecord) -> None:
            done.append(record)
            if trainer.reports:
                self._report(record, total)

        for rows in batches(
            self._samples,
            batch=batch,
            rows_per_step=rows_per_step,
            epochs=options.epochs,
            seed=options.seed,
            num_ranks=num_ranks,
            first_step=last + 1,
            last_step=total,
        ):
            trainer.train(rows, on_step)
            checkpoints.after(rows.steps[-1].step, total)
        self._export(trainer)
        return done

    def _trainer(self, total: int) -> Trainer:
        from psrl.offline.training import Trainer

        options = self._options
        max_tokens = options.max_tokens
        if options.sharing == "off":
            max_tokens = max(max_tokens, *(sample.num_tokens for sample in self._samples))
        return Trainer(options, self._folder, self._tokenizer_folder, max_tokens, total)

    def _greet(self, trainer: Trainer, num_ranks: int, total: int, last: int) -> None:
        if not trainer.reports:
            return
        layout, options = self._options.layout, self._options
        sizes = ", ".join(f"{name} {size}" for name, size in vars(layout).items() if size > 1)
        shared = "prefixes shared" if options.sharing == "on" else "prefixes not shared: veRL's own path"
        resumed = f"; resumed after step {last}" if last else ""
        self._say(
            f"{self._processes.world_size} processes, {num_ranks} data-parallel ranks{', ' if sizes else ''}{sizes}; "
            f"{len(self._samples)} samples, {total} steps of {options.rows_per_step}; {options.objective}, {shared}"
            f"{resumed}"
        )

    def _report(self, record: StepRecord, total: int) -> None:
        metrics = record.metrics
        loss = metrics.get("loss", metrics.get("actor/pg_loss", float("nan")))
        self._say(
            f"step {record.step}/{total}: loss {loss:.6g}, grad norm {metrics['grad_norm']:.6g}, "
            f"{record.samples} samples, {self._tokens(record)}, "
            f"imbalance {record.imbalance:.2f}, {record.seconds:.2f} s"
        )
        if self._options.metrics is not None:
            with self._options.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    @staticmethod
    def _tokens(record: StepRecord) -> str:
        if record.unique_tokens is None:
            return f"{record.tokens:,} tokens"
        return f"{record.tokens:,} tokens, {record.unique_tokens:,} of them computed"

    def _export(self, trainer: Trainer) -> None:
        """Write the trained model. Gathering the weights is collective, writing is rank 0's."""
        if self._options.out is None:
            return
        from psrl.integrations.verl.local.supervised import model_weights

        weights = dict(model_weights(trainer.worker))
        if self._processes.rank == 0:
            tokenizer = tokenizer_source(self._options.tokenizer)
            write_model(self._options.out, self._folder, tokenizer, weights, self._options.dtype)
            self._say(f"wrote {self._options.out}")


def _model_folder(model: str) -> Path | None:
    """None for a random model, which is made when the samples are known."""
    if model in TINY_MODELS:
        return None
    return named_model_folder(model) if model in NAMED_MODELS else Path(model)


def _random_model(options: OfflineOptions, samples: Sequence[ReplaySample], folder: Path) -> None:
    """The same in every process: the weights come from the seed."""
    largest = max(samples, key=lambda sample: int(sample.input_ids_N.max()))
    vocab_size = vocabulary_for(int(largest.input_ids_N.max()), largest.where)
    longest = max(int(sample.position_ids_N.max()) for sample in samples)
    make_random_model(options.model, options.tiny, vocab_size, options.seed, longest, folder)


def _read_samples(options: OfflineOptions, folder: Path | None) -> list[ReplaySample]:
    def note(text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"note: {text}", file=sys.stderr)

    def tokenizer() -> ChatTokenizer:
        if options.tokenizer is not None:
            return load_tokenizer(options.tokenizer)
        return load_model_tokenizer(None if folder is None else str(folder), note)

    loaded = load_samples(options.files, tokenizer=tokenizer, mode=options.mode, limit=options.limit)
    samples = [sample for sample in loaded.samples if sample.num_targets]
    num_dropped = len(loaded.samples) - len(samples) + len(loaded.rows_without_samples)
    if samples and num_dropped:
        note(f"{num_dropped} rows without targets are left out")
    if not samples:
        raise InputError(f"{loaded.samples[0].where}: none of the samples has a target (token with loss_mask 1)")
    if options.sharing == "off":
        for sample in samples:
            if not sample.has_default_positions:
                raise InputError(
                    f"{sample.where}: position_ids are not 0, 1, 2, ...: veRL's packed sequences ignore them, so this "
                    "sample trains only with --sharing on"
                )
    return samples
