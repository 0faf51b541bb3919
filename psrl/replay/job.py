"""The replay job: read, check, build, run, compare, write."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from psrl.data import ChatTokenizer, ReplaySample, load_samples, load_tokenizer
from psrl.data.samples import check_vocabulary
from psrl.data.tokenizer import load_model_tokenizer
from psrl.errors import InputError
from psrl.integrations.verl.compat import quiet_upstream
from psrl.models import NAMED_MODELS, named_model_folder
from psrl.replay.checkpoint import check_weights
from psrl.replay.model import (
    ReplayModel,
    check_model_folder,
    make_placeholder_tokenizer,
    make_random_model,
    vocabulary_for,
)
from psrl.replay.options import TINY_MODELS, ReplayOptions
from psrl.replay.output import check_targets, staged_json, write_dump
from psrl.replay.progress import Progress
from psrl.replay.ranks import Ranks, run_on_ranks

if TYPE_CHECKING:
    from psrl.replay.compare import Difference
    from psrl.replay.phases import PhaseRunner
    from psrl.replay.side import Side

EXIT_OK, EXIT_DIFFERENT = 0, 1
_T = TypeVar("_T")


def run_replay(options: ReplayOptions) -> int:
    """Run a replay; returns the exit code: 0, or 1 where ``--sharing both`` finds a difference beyond tolerance.

    Nothing is written unless everything ran.

    Raises:
        PSRLError: the input, the model or an option is not usable; the message is for the user.
    """
    check_targets(options.dump, options.json, options.files)
    if options.model in NAMED_MODELS:
        options = dataclasses.replace(options, model=str(named_model_folder(options.model)))
    if options.parallel.num_ranks == 1:
        return _run_rank(options, Ranks())
    return run_on_ranks(options.parallel.num_ranks, _run_rank, options)


def _run_rank(options: ReplayOptions, ranks: Ranks) -> int:
    """The replay as one of its processes; the first reports and writes."""
    num_sides = 2 if options.sharing == "both" else 1
    total = 1 + num_sides * (1 + 3 * options.repeat)
    with Progress(total=total, repeats=options.repeat, is_shown=ranks.is_first) as progress:
        with progress.task("reading", ", ".join(path.name for path in options.files)):
            vocab_size = None if options.model in TINY_MODELS else check_model_folder(options.model)
            samples = _read_samples(options, progress)
            vocab_size = _check_vocabulary(options, samples, vocab_size)
        with tempfile.TemporaryDirectory(prefix="psrl_replay_") as scratch:
            runner = quietly(lambda: _run(options, samples, vocab_size, Path(scratch), progress, ranks))
        if not ranks.is_first:
            return EXIT_OK
        differences = _compare(options, runner, progress) if options.sharing == "both" else None
    return _finish(options, samples, vocab_size, runner, differences)


def quietly(run: Callable[[], _T]) -> _T:
    """Run without the upstreams' chatter, which reaches the terminal only with an error that nobody expected."""
    stop: BaseException | None = None
    with quiet_upstream():
        try:
            import psrl.replay.phases  # noqa: F401  (torch and the upstreams: seconds, after the input was checked)
        except (KeyboardInterrupt, SystemExit) as error:
            stop = error
    if stop is not None:
        raise stop
    with quiet_upstream():  # again: it reaches the log handlers that exist when it begins
        try:
            return run()
        except (KeyboardInterrupt, SystemExit) as error:
            stop = error
    raise stop


def _read_samples(options: ReplayOptions, progress: Progress) -> Sequence[ReplaySample]:
    loaded = load_samples(
        options.files,
        tokenizer=lambda: _load_tokenizer(options, progress),
        mode=options.mode,
        limit=options.limit,
    )
    if loaded.rows_without_samples:
        rows = loaded.rows_without_samples
        progress.note(f"{len(rows)} chat rows have no assistant message and give no sample, the first is {rows[0]}")
    samples = loaded.samples
    if options.sharing != "on":
        _check_positions(samples, options.sharing)
        _check_mini_batches(samples, options.mini_batch)
    return samples


def _load_tokenizer(options: ReplayOptions, progress: Progress) -> ChatTokenizer:
    """``--tokenizer``, else the model folder's own where it can write ChatML, else bytes."""
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    return load_model_tokenizer(None if options.model in TINY_MODELS else options.model, progress.note)


def _check_mini_batches(samples: Sequence[ReplaySample], mini_batch: int | None) -> None:
    """Without sharing, a mini-batch without target is 0/0 in veRL's losses; with it, its gradient is zero."""
    size = mini_batch or len(samples)
    for start in range(0, len(samples), size):
        chosen = samples[start : start + size]
        if not any(sample.num_targets for sample in chosen):
            raise InputError(
                f"{chosen[0].where}: the mini-batch of {len(chosen)} samples that begins here has no target (token "
                "with loss_mask 1), which veRL's loss divides by; use --sharing on or a larger --mini-batch"
            )


def _check_positions(samples: Sequence[ReplaySample], sharing: str) -> None:
    for sample in samples:
        if not sample.has_default_positions:
            raise InputError(
                f"{sample.where}: position_ids are not 0, 1, 2, ...: veRL's packed sequences ignore them, so this "
                f"sample runs only with --sharing on (got --sharing {sharing})"
            )


def _check_vocabulary(options: ReplayOptions, samples: Sequence[ReplaySample], vocab_size: int | None) -> int:
    """Size of the model's vocabulary; a random model gets one that is large enough."""
    if vocab_size is None:
        largest = max(samples, key=lambda sample: int(sample.input_ids_N.max()))
        return vocabulary_for(int(largest.input_ids_N.max()), largest.where)
    check_vocabulary(samples, vocab_size, options.model)
    return vocab_size


def _run(
    options: ReplayOptions,
    samples: Sequence[ReplaySample],
    vocab_size: int,
    scratch: Path,
    progress: Progress,
    ranks: Ranks,
) -> PhaseRunner:
    from psrl.replay.phases import PhaseRunner
    from psrl.replay.side import SHARED, UNSHARED

    names = {"on": (SHARED,), "off": (UNSHARED,), "both": (SHARED, UNSHARED)}[options.sharing]
    sides: list[Side] = []
    if options.model not in TINY_MODELS:
        check_weights(Path(options.model))
    model = prepare_model(options, samples, vocab_size, scratch)
    for name in names:
        with progress.task("building the model", name):
            sides.append(_build(name, options, model, samples, progress))
    runner = PhaseRunner(options, samples, sides, progress, ranks)
    runner.run()
    return runner


def _build(
    name: str, options: ReplayOptions, model: ReplayModel, samples: Sequence[ReplaySample], progress: Progress
) -> Side:
    from psrl.replay.side import UNSHARED, build_side

    max_tokens = options.max_tokens
    longest = max(sample.num_tokens for sample in samples)
    if name == UNSHARED and longest > max_tokens:
        progress.note(
            f"without sharing the token budget is {longest}, the longest sample, instead of {max_tokens}: veRL does "
            "not split samples"
        )
        max_tokens = longest
    return build_side(name, options, model, max_tokens)


def prepare_model(
    options: ReplayOptions, samples: Sequence[ReplaySample], vocab_size: int, scratch: Path
) -> ReplayModel:
    """The model that the options name, or a random one in ``scratch``, with a tokenizer that veRL can load."""
    folder, tokenizer_folder = Path(options.model), scratch / "tokenizer"
    make_placeholder_tokenizer(tokenizer_folder)
    if options.model in TINY_MODELS:
        folder = scratch / "model"
        max_position = max(int(sample.position_ids_N.max()) for sample in samples)
        make_random_model(options.model, options.tiny, vocab_size, options.seed, max_position, folder)
    return ReplayModel(options.model, folder, tokenizer_folder, vocab_size)


def _compare(options: ReplayOptions, runner: PhaseRunner, progress: Progress) -> list[Difference]:
    from psrl.integrations.verl.local.actor_loss import depends_on_micro_batches
    from psrl.replay.compare import TOLERANCES, compare_sides
    from psrl.replay.phases import UPDATE
    from psrl.replay.side import UNSHARED

    unshared = runner.runs[UPDATE][UNSHARED].first
    one_each = unshared.forwards == runner.num_mini_batches
    coupled = depends_on_micro_batches(options.loss, options.effective_loss_agg_mode, options.loss_scale_factor)
    if coupled and not one_each:
        progress.note(
            f"gradients and metrics are not compared: without sharing, the {options.loss} loss depends on how the "
            "mini-batch is cut into micro-batches; with a larger --max-tokens it is not cut"
        )
    return compare_sides(
        runner.runs,
        runner.cu_targets.tolist(),
        tolerance=options.tolerance if options.tolerance is not None else TOLERANCES[options.dtype],
        with_update=one_each or not coupled,
        all_metrics=one_each,
    )


def _finish(
    options: ReplayOptions,
    samples: Sequence[ReplaySample],
    vocab_size: int,
    runner: PhaseRunner,
    differences: list[Difference] | None,
) -> int:
    from psrl.replay.report import make_record, print_record

    record = make_record(options, samples, vocab_size, runner.runs, differences)
    with contextlib.nullcontext() if options.json is None else staged_json(options.json, record):
        if options.dump is not None:
            write_dump(options.dump, runner.sample_values(), runner.gradients(), record)
    print_record(record)
    return EXIT_OK if all(d.is_within for d in differences or ()) else EXIT_DIFFERENT
