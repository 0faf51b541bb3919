"""The benchmark job: read, run, count, simulate, write."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psrl import __version__
from psrl.analyze.shapes import load_shape
from psrl.bench.cluster import scale_ranks
from psrl.bench.options import ABLATIONS, BenchOptions
from psrl.bench.page import make_page
from psrl.bench.plans import byte_curves
from psrl.bench.plots import draw_plots
from psrl.bench.tables import make_tables, write_csv
from psrl.bench.traces import Trace, made_up_samples, read_trace, samples_of
from psrl.data import ReplaySample, load_tokenizer
from psrl.errors import ConfigError, InputError
from psrl.files import write_json, write_text
from psrl.plan_view.job import batch_of
from psrl.replay.job import quietly
from psrl.systems import UNSHARED
from psrl.tree import build_tree

Note = Callable[[str], None]
Cases = dict[tuple[str, str], list[ReplaySample]]
"""Samples by trace and strategy."""


def run_bench(options: BenchOptions, command: str, note: Note) -> None:
    """Measure everything and write ``bench.json``, a CSV file a table, plots, and the page where one is asked for.

    Args:
        command: as the user wrote it, for the page.

    Raises:
        PSRLError: the input or an option is not usable; the message is for the user.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    if options.page is not None and not options.page.absolute().parent.is_dir():
        raise InputError(f"--page {options.page}: there is no folder {options.page.absolute().parent}")
    cases = read_cases(options)
    counted = _counted_cases(options)
    start = time.perf_counter()
    record: dict[str, Any] = {
        "psrl_version": __version__,
        "command": command,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "options": options.for_report(),
        "cases": [_describe(case, samples) for case, samples in cases.items()],
    }
    record |= quietly(lambda: measure_cases(options, cases, note))
    note("planning")
    model = load_shape(options.shape)
    record["bytes"] = [
        {**_describe(case, samples), "systems": byte_curves(samples, model, options.max_tokens)}
        for case, samples in counted.items()
    ]
    record["ranks"] = []
    for num_ranks in options.ranks:
        note(f"simulating {num_ranks} ranks")
        record["ranks"].append(scale_ranks(options, _main_case(cases), num_ranks))
    record["seconds"] = time.perf_counter() - start
    write_results(options, record)


def write_results(options: BenchOptions, record: dict[str, Any]) -> None:
    """All files, from the record alone."""
    write_json("--out", options.out / "bench.json", record)
    tables = make_tables(record)
    for table in tables:
        write_csv(options.out, table)
    images = options.out if options.page is None else options.page.parent / "img"
    images.mkdir(exist_ok=True)
    plots = draw_plots(record, images)
    if options.page is not None:
        write_text("--page", options.page, make_page(record, tables, plots))


def read_cases(options: BenchOptions) -> Cases:
    """
    Raises:
        ConfigError: no strategy fits any trace.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    traces: list[Trace] = [read_trace(path, tokenizer, options.limit, options.turns) for path in options.files]
    cases = {
        (trace.name, strategy): samples_of(trace, strategy, options.window)
        for trace in traces
        for strategy in options.strategies
        if trace.fits(strategy)
    }
    if not cases:
        raise ConfigError(
            f"none of the strategies {', '.join(options.strategies)} fits: tree and tree_step are for traces whose "
            "rows branch off each other, the others for those whose rows do not"
        )
    return cases


def _counted_cases(options: BenchOptions) -> Cases:
    """Of every trace the whole rows whose plans are counted, with one sample a turn."""
    whole = dataclasses.replace(
        options, limit=options.counted_rows, turns=None, strategies=("step", "tree_step")
    )  # fmt: skip
    return read_cases(whole)


def measure_cases(options: BenchOptions, cases: Cases, note: Note) -> dict[str, Any]:
    """Everything that runs in the engine."""
    from psrl.bench.measure import Bench  # torch and the upstreams

    made_up = {factor: made_up_samples(factor, options.seed) for factor in options.lengths}
    every = [sample for samples in (*cases.values(), *made_up.values()) for sample in samples]
    largest = max(every, key=lambda sample: int(sample.input_ids_N.max()))
    longest = max(every, key=lambda sample: sample.num_tokens)
    names = list(dict.fromkeys((*options.systems, *ABLATIONS)))
    with tempfile.TemporaryDirectory(prefix="psrl_bench_") as scratch:
        note(f"building {len(names)} systems")
        bench = Bench(options, names, largest, longest, Path(scratch))
        throughput: list[dict[str, Any]] = []
        for (trace, strategy), samples in cases.items():
            note(f"running {trace}, {strategy}: {len(samples)} samples")
            systems = bench.run(samples, options.systems)
            throughput.append({"trace": trace, "strategy": strategy, "systems": systems})
        note("running psrl without one mechanism")
        ablations = bench.run(_main_case(cases), ABLATIONS)
        lengths: list[dict[str, Any]] = []
        for factor, samples in made_up.items():
            note(f"running sequences {factor} times as long")
            lengths.append(
                {
                    "factor": factor,
                    "longest": max(s.num_tokens for s in samples),
                    "systems": bench.run(samples, (UNSHARED, "tree_packing", "psrl")),
                }
            )
    main = next(case for case, samples in cases.items() if samples is _main_case(cases))
    return {
        "throughput": throughput,
        "ablations": {"trace": main[0], "strategy": main[1], "systems": ablations},
        "lengths": lengths,
    }


def _main_case(cases: Cases) -> list[ReplaySample]:
    """For ablations and ranks: the first with one sample a turn, else the first."""
    return next((samples for (_, strategy), samples in cases.items() if strategy == "step"), next(iter(cases.values())))


def _describe(case: tuple[str, str], samples: Sequence[ReplaySample]) -> dict[str, Any]:
    lengths = [sample.num_tokens for sample in samples]
    return {
        "trace": case[0], "strategy": case[1], "samples": len(samples), "tokens": sum(lengths),
        "longest": max(lengths), "mean": sum(lengths) / len(lengths),
        "unique_tokens": build_tree(batch_of(samples)).num_tokens,
    }  # fmt: skip
