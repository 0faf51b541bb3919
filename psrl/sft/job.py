"""The training job: read, check, build, train, write."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.config import PSRLConfig
from psrl.data import ReplaySample, load_samples, load_tokenizer
from psrl.data.samples import check_vocabulary
from psrl.data.tokenizer import ChatTokenizer, load_model_tokenizer
from psrl.errors import InputError
from psrl.integrations.verl.compat import quiet_upstream
from psrl.models import NAMED_MODELS, named_model_folder
from psrl.replay.checkpoint import check_weights
from psrl.replay.model import check_model_folder, make_placeholder_tokenizer, make_random_model, vocabulary_for
from psrl.replay.options import TINY_MODELS, TinyModel
from psrl.replay.output import check_targets, write_json
from psrl.replay.progress import Progress
from psrl.sft.batches import epoch_batches
from psrl.sft.export import check_out, tokenizer_source, write_model
from psrl.sft.options import SFTOptions


@dataclass(frozen=True)
class EpochRecord:
    """One pass over all samples."""

    epoch: int
    loss: float
    """Negative log-prob per target, each batch's before its step; averaged over the epoch's targets."""
    batch_losses: list[float]
    grad_norms: list[float]
    tokens: int
    unique_tokens: int | None
    """Tokens that were computed. None without sharing."""
    seconds: float


@dataclass(frozen=True)
class SFTReport:
    """What a training did."""

    options: SFTOptions
    num_samples: int
    num_targets: int
    epochs: list[EpochRecord]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "options": self.options.for_report(),
            "samples": self.num_samples,
            "targets": self.num_targets,
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
        }


def run_sft(options: SFTOptions, on_epoch: Callable[[str], None] | None = None) -> SFTReport:
    """Train, and write the model to ``options.out``; nothing is written unless everything ran.

    Args:
        on_epoch: takes a line of text after every epoch; by default it is printed.

    Raises:
        PSRLError: the input, the model or an option is not usable; the message is for the user.
    """
    check_out(options.out)
    check_targets(None, options.json, options.files)
    stdout = sys.stdout
    with tempfile.TemporaryDirectory(prefix="psrl_sft_") as scratch, Progress(total=2, repeats=1) as progress:
        with progress.task("reading", ", ".join(path.name for path in options.files)):
            folder = _model_folder(options.model)
            vocab_size = None if folder is None else check_model_folder(str(folder))
            samples = _read_samples(options, folder, progress)
            if vocab_size is not None:
                check_vocabulary(samples, vocab_size, options.model)

        def say(line: str) -> None:
            if progress.console.is_terminal:
                progress.console.print(line, markup=False)
            else:
                print(line, file=stdout, flush=True)

        report = _quietly(lambda: _run(options, folder, samples, Path(scratch), progress, on_epoch or say))
    if options.json is not None:
        write_json(options.json, report.record())
    return report


def _model_folder(model: str) -> Path | None:
    """None for a random model, which is made when the samples are known."""
    if model in TINY_MODELS:
        return None
    return named_model_folder(model) if model in NAMED_MODELS else Path(model)


def _quietly(run: Callable[[], SFTReport]) -> SFTReport:
    """Run without the upstreams' chatter, which reaches the terminal only with an error that nobody expected."""
    with quiet_upstream():
        import psrl.integrations.verl.worker  # noqa: F401  (torch and the upstreams: seconds, after the checks)
    with quiet_upstream():  # again: it reaches the log handlers that exist when it begins
        try:
            return run()
        except KeyboardInterrupt as error:
            interrupt = error
    raise interrupt


def _read_samples(options: SFTOptions, folder: Path | None, progress: Progress) -> list[ReplaySample]:
    def tokenizer() -> ChatTokenizer:
        if options.tokenizer is not None:
            return load_tokenizer(options.tokenizer)
        return load_model_tokenizer(None if folder is None else str(folder), progress.note)

    loaded = load_samples(options.files, tokenizer=tokenizer, mode=options.mode, limit=options.limit)
    samples = [sample for sample in loaded.samples if sample.num_targets]
    num_dropped = len(loaded.samples) - len(samples) + len(loaded.rows_without_samples)
    if not samples:
        raise InputError(f"{loaded.samples[0].where}: none of the samples has a target (token with loss_mask 1)")
    if num_dropped:
        progress.note(f"{num_dropped} rows without targets are left out")
    if options.sharing == "off":
        for sample in samples:
            if not sample.has_default_positions:
                raise InputError(
                    f"{sample.where}: position_ids are not 0, 1, 2, ...: veRL's packed sequences ignore them, so this "
                    "sample trains only with --sharing on"
                )
    return samples


def _run(
    options: SFTOptions,
    folder: Path | None,
    samples: Sequence[ReplaySample],
    scratch: Path,
    progress: Progress,
    on_epoch: Callable[[str], None],
) -> SFTReport:
    from psrl.integrations.verl.supervised import model_weights

    if folder is None:
        folder = scratch / "model"
        largest = max(samples, key=lambda sample: int(sample.input_ids_N.max()))
        vocab_size = vocabulary_for(int(largest.input_ids_N.max()), largest.where)
        longest = max(int(sample.position_ids_N.max()) for sample in samples)
        make_random_model(options.model, TinyModel(), vocab_size, options.seed, longest, folder)
    else:
        check_weights(folder)
    make_placeholder_tokenizer(scratch / "tokenizer")
    batches = [epoch_batches(samples, options.batch, options.seed, epoch) for epoch in range(options.epochs)]
    progress.add(sum(map(len, batches)))
    with progress.task("building the model", options.model):
        worker = _build(options, folder, scratch / "tokenizer", samples, sum(map(len, batches)))
    report = SFTReport(options, len(samples), sum(sample.num_targets for sample in samples), [])
    for epoch, epochs_batches in enumerate(batches, start=1):
        report.epochs.append(_train_epoch(worker, options, epoch, epochs_batches, progress))
        on_epoch(_line(report.epochs[-1], options.epochs))
    tokenizer = tokenizer_source(options.tokenizer)
    write_model(options.out, folder, tokenizer, dict(model_weights(worker)), options.dtype)
    return report


def _build(
    options: SFTOptions, folder: Path, tokenizer_folder: Path, samples: Sequence[ReplaySample], num_steps: int
) -> Any:
    from psrl.integrations.verl.supervised import supervised_loss
    from psrl.integrations.verl.worker import build_training_worker

    worker = build_training_worker(
        folder,
        dtype=options.dtype,
        psrl_config=PSRLConfig(enable=options.sharing == "on"),
        max_tokens=_max_tokens(options, samples),
        lr=options.lr,
        seed=options.seed,
        quiet=False,  # the whole job is
        optimizer={"lr_warmup_steps": options.warmup, "total_training_steps": max(num_steps, options.warmup + 1)},
        model={"tokenizer_path": str(tokenizer_folder)},
    )
    worker.set_loss_fn(supervised_loss())
    return worker


def _max_tokens(options: SFTOptions, samples: Sequence[ReplaySample]) -> int:
    """veRL does not split samples."""
    longest = max(sample.num_tokens for sample in samples)
    return options.max_tokens if options.sharing == "on" else max(options.max_tokens, longest)


def _train_epoch(
    worker: Any, options: SFTOptions, epoch: int, batches: Sequence[Sequence[ReplaySample]], progress: Progress
) -> EpochRecord:
    from psrl.integrations.verl.supervised import supervised_batch, train_on

    losses: list[float] = []
    grad_norms: list[float] = []
    unique_tokens = 0
    start = time.perf_counter()
    for batch in batches:
        with progress.task(f"epoch {epoch}/{options.epochs}", f"loss {losses[-1]:.4f}" if losses else "loss -"):
            max_tokens = _max_tokens(options, batch)
            metrics = train_on(worker, supervised_batch(batch, max_tokens=max_tokens, seed=options.seed))
        losses.append(metrics["loss"])
        grad_norms.append(metrics["grad_norm"])
        if options.sharing == "on":
            unique_tokens += worker.engine.last_report.stats.unique_tokens
    targets = [sum(sample.num_targets for sample in batch) for batch in batches]
    return EpochRecord(
        epoch=epoch,
        loss=sum(loss * num for loss, num in zip(losses, targets, strict=True)) / sum(targets),
        batch_losses=losses,
        grad_norms=grad_norms,
        tokens=sum(sample.num_tokens for batch in batches for sample in batch),
        unique_tokens=unique_tokens if options.sharing == "on" else None,
        seconds=time.perf_counter() - start,
    )


def _line(epoch: EpochRecord, num_epochs: int) -> str:
    text = f"epoch {epoch.epoch}/{num_epochs}  loss {epoch.loss:.4f}  {epoch.seconds:.1f} s"
    if epoch.unique_tokens is not None:
        text += f"  {epoch.tokens:,} tokens, {epoch.unique_tokens:,} of them computed"
    return text
