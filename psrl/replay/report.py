"""The results of a replay as JSON values and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table

from psrl import __version__
from psrl.cache import CacheBytes
from psrl.console import table_console
from psrl.data import ReplaySample
from psrl.integrations.megatron.local_spec import uses_transformer_engine
from psrl.replay.compare import Difference
from psrl.replay.options import ReplayOptions
from psrl.replay.phases import PHASES, UPDATE, PhaseRun
from psrl.replay.side import SHARED, UNSHARED
from psrl.tree import build_tree
from psrl.types import SampleBatch

PHASE_NAMES = {"old_log_prob": "old log-prob", "ref": "reference", "update": "update"}
_NONE = "-"
_HOST_KEYS = (
    "kv_host_bytes_peak", "kv_host_bytes_predicted", "kv_bytes_to_host", "kv_bytes_to_host_predicted",
    "kv_bytes_to_device", "kv_bytes_to_device_predicted",
)  # fmt: skip


def make_record(
    options: ReplayOptions,
    samples: Sequence[ReplaySample],
    vocab_size: int,
    runs: Mapping[str, Mapping[str, PhaseRun]],
    differences: Sequence[Difference] | None,
) -> dict[str, Any]:
    """Everything that was measured. Plan figures are those of the update's first step, added up over mini-batches.

    ``kv_bytes_peak`` is measured, ``kv_bytes_predicted`` is the plan's; so with the bytes of the host tier, each of the
    phase where it is largest. ``attention_bytes`` are what the update kept of attention for its second pass, measured.
    None without sharing, as is all that needs a plan. Seconds are medians over repeats, of one pass over all samples;
    ``cpu_seconds`` count this process's processor time. ``peak_bytes`` are of the GPU's memory, beside weights,
    gradients and optimizer; None without one.
    """
    num_tokens = sum(sample.num_tokens for sample in samples)
    phases = {phase: _phase_record(runs[phase], num_tokens) for phase in PHASES}
    update = phases[UPDATE]
    shared = SHARED in runs[UPDATE]
    unique = update["unique_tokens"] if shared else count_unique_tokens(samples, options.mini_batch)
    side = SHARED if shared else UNSHARED
    return {
        "psrl_version": __version__,
        "options": options.for_report(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "layers": "TransformerEngine" if uses_transformer_engine() else "PyTorch",
        "vocab_size": vocab_size,
        "samples": len(samples),
        "targets": sum(sample.num_targets for sample in samples),
        "tokens": num_tokens,
        "unique_tokens": unique,
        "prefix_match_rate": 1.0 - unique / num_tokens,
        "spine_tokens": update["spine_tokens"],
        "recomputed_tokens": update["recomputed_tokens"],
        "micro_batches": update["micro_batches"] if shared else update["forwards_unshared"],
        "waves": update["waves"],
        "kv_bytes_peak": _largest(phases, "kv_bytes_peak"),
        "kv_bytes_predicted": _largest(phases, "kv_bytes_predicted"),
        "attention_bytes": update["attention_bytes"],
        **{key: _largest(phases, key) for key in _HOST_KEYS},
        **phases,
        "metrics": runs[UPDATE][side].metrics,
        "comparison": None if differences is None else [asdict(d) | {"within": d.is_within} for d in differences],
    }


def _phase_record(run: Mapping[str, PhaseRun], num_tokens: int) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for side in (SHARED, UNSHARED):
        timing = _timing(run.get(side), num_tokens)
        record |= {f"{key}_{side}": value for key, value in timing.items()}
    record["speedup"] = _ratio(record["seconds_unshared"], record["seconds_shared"])
    record["cpu_speedup"] = _ratio(record["cpu_seconds_unshared"], record["cpu_seconds_shared"])
    return record | _plan_record(run.get(SHARED))


def _timing(run: PhaseRun | None, num_tokens: int) -> dict[str, Any]:
    if run is None:
        return dict.fromkeys(("seconds", "cpu_seconds", "tokens_per_second", "all_seconds", "forwards", "peak_bytes"))
    return {
        "seconds": run.median.wall,
        "cpu_seconds": run.median.cpu,
        "tokens_per_second": num_tokens / run.median.wall,
        "all_seconds": [seconds.wall for seconds in run.seconds],
        "forwards": run.first.forwards,
        "peak_bytes": statistics.median(run.peak_bytes) if run.peak_bytes else None,
    }


def _plan_record(run: PhaseRun | None) -> dict[str, Any]:
    """What only a side that shares knows."""
    if run is None:
        return dict.fromkeys(
            ("ideal_speedup", "planning_seconds", "planning_wait_seconds", "planning_share", "unique_tokens",
             "spine_tokens", "recomputed_tokens", "micro_batches", "waves", "kv_bytes_peak", "kv_bytes_predicted",
             "attention_bytes",
             *_HOST_KEYS)
        )  # fmt: skip
    reports = run.first.reports
    stats = [report.stats for report in reports]
    return {
        "ideal_speedup": sum(s.flops_unshared for s in stats) / sum(s.flops_shared for s in stats),
        "planning_seconds": run.planning_seconds / len(run.seconds),
        "planning_wait_seconds": run.planning_wait_seconds / len(run.seconds),
        "planning_share": run.planning_seconds / sum(seconds.wall for seconds in run.seconds),
        "unique_tokens": sum(s.unique_tokens for s in stats),
        "spine_tokens": sum(s.spine_tokens for s in stats),
        "recomputed_tokens": sum(s.recomputed_tokens for s in stats),
        "micro_batches": sum(s.num_micro_batches for s in stats),
        "waves": sum(s.num_waves for s in stats),
        "kv_bytes_peak": max(report.kv_bytes_measured for report in reports),
        "kv_bytes_predicted": max(s.kv_bytes_peak for s in stats),
        "attention_bytes": max(report.attention_bytes for report in reports),
        **_host_record(reports),
    }


def _host_record(reports: Sequence[Any]) -> dict[str, Any]:
    measured, predicted = (
        reduce(CacheBytes.then, (getattr(report, name) for report in reports))
        for name in ("kv_bytes", "kv_bytes_predicted")
    )
    pairs = list(zip(measured, predicted, strict=True))[1:]  # the first is the device's
    return dict(zip(_HOST_KEYS, (value for pair in pairs for value in pair), strict=True))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def count_unique_tokens(samples: Sequence[ReplaySample], mini_batch: int | None) -> int:
    """Distinct prefixes within each mini-batch."""
    size = mini_batch or len(samples)
    return sum(_unique_tokens(samples[start : start + size]) for start in range(0, len(samples), size))


def _unique_tokens(samples: Sequence[ReplaySample]) -> int:
    seqlens = [sample.num_tokens for sample in samples]
    batch = SampleBatch(
        token_ids_N=np.concatenate([sample.input_ids_N for sample in samples]),
        position_ids_N=np.concatenate([sample.position_ids_N for sample in samples]),
        cu_seqlens=np.concatenate([[0], np.cumsum(seqlens)]).astype(np.int64),
        target_mask_N=np.concatenate([sample.loss_mask_N for sample in samples]),
        group_ids_S=np.zeros(len(samples), dtype=np.int64),
        temperatures_S=np.ones(len(samples)),
    )
    return build_tree(batch).num_tokens


def _largest(phases: Mapping[str, Mapping[str, Any]], key: str) -> int | None:
    values = [phases[phase][key] for phase in PHASES if phases[phase][key] is not None]
    return max(values) if values else None


# ------------------------------------------------------------------------------------------------------------- table
def print_record(record: Mapping[str, Any]) -> None:
    """Print the table to stdout."""
    console = table_console()
    tables = [_figures(record), _phases(record)]
    if record["comparison"] is not None:
        tables.append(_comparison(record["comparison"]))
    console.print(Group(*tables))


def _figures(record: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    rows = (
        ("samples", _count(record["samples"])),
        ("tokens", _count(record["tokens"])),
        ("unique tokens", _count(record["unique_tokens"])),
        ("match rate", f"{100 * record['prefix_match_rate']:.1f} %"),
        ("spine tokens", _count(record["spine_tokens"])),
        ("micro-batches", _count(record["micro_batches"])),
        ("peak KV bytes, predicted", _count(record["kv_bytes_predicted"])),
        ("peak KV bytes, measured", _count(record["kv_bytes_peak"])),
        ("kept attention bytes", _count(record["attention_bytes"])),
        *_host_rows(record),
        *([("tokens computed again", _count(again))] if (again := record["recomputed_tokens"]) else []),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _host_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the phase that takes most, where there are any."""
    names = {
        "kv_host_bytes_peak": "peak host bytes",
        "kv_bytes_to_host": "bytes moved to the host",
        "kv_bytes_to_device": "bytes moved to the device",
    }
    return [(name, _count(record[key])) for key, name in names.items() if record[key]]


def _phases(record: Mapping[str, Any]) -> Table:
    table = _table()
    table.add_column("phase", no_wrap=True)
    columns = ("shared s", "tokens/s", "unshared s", "tokens/s", "speed-up", "ideal", "planning")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for phase in PHASES:
        values = record[phase]
        table.add_row(
            PHASE_NAMES[phase],
            _float(values["seconds_shared"], "{:.3f}"),
            _float(values["tokens_per_second_shared"], "{:,.0f}"),
            _float(values["seconds_unshared"], "{:.3f}"),
            _float(values["tokens_per_second_unshared"], "{:,.0f}"),
            _float(values["speedup"], "{:.2f}x"),
            _float(values["ideal_speedup"], "{:.2f}x"),
            _float(values["planning_share"], "{:.1%}"),
        )
    return table


def _comparison(differences: Sequence[Mapping[str, Any]]) -> Table:
    table = _table()
    table.add_column("shared - unshared", no_wrap=True)
    table.add_column("worst", no_wrap=True)  # relative to the largest value
    table.add_column("limit", no_wrap=True)
    table.add_column("")
    table.add_column("at", overflow="fold")
    for d in differences:
        limit = _float(d["tolerance"], "{:.0e}")
        table.add_row(d["quantity"], f"{d['worst']:.1e}", limit, "" if d["within"] else "TOO LARGE", d["where"])
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), header_style="bold")


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _float(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)
