"""The record of a benchmark as tables."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from psrl.bench.options import HALF
from psrl.systems import UNSHARED

Cell = str | int | float


class Table(NamedTuple):
    name: str
    """Of its CSV file."""
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    def markdown(self) -> str:
        lines = [self.header, tuple("---" if i == 0 else "---:" for i in range(len(self.header)))]
        return "\n".join("| " + " | ".join(_text(x) for x in row) + " |" for row in (*lines, *self.rows))


def make_tables(record: Mapping[str, Any]) -> list[Table]:
    """All tables, in the page's order."""
    return [
        _cases(record["cases"]),
        _throughput(record["throughput"]),
        _cache(record["throughput"]),
        _phases(record["throughput"]),
        _bytes(record["bytes"]),
        _kv(record["bytes"]),
        _ablations(record),
        _latency(record["ablations"]["systems"]),
        _evenness(record["bytes"]),
        _lengths(record["lengths"]),
        _ranks(record["ranks"]),
    ]


def write_csv(folder: Path, table: Table) -> None:
    """One file, full precision."""
    with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([table.header, *table.rows])


def _text(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def _cases(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            _case(c), c["samples"], c["tokens"], c["unique_tokens"],
            f"{1 - c['unique_tokens'] / c['tokens']:.2%}", c["mean"], c["longest"],
        )
        for c in cases
    ]  # fmt: skip
    return Table("cases", ("case", "samples", "tokens", "unique", "match rate", "mean", "longest"), rows)


def _case(case: Mapping[str, Any]) -> str:
    return f"{case['trace']} {case['strategy']}"


def _ratio(values: Mapping[str, Any], kind: str) -> str:
    low, high = values[f"{kind}_ratio_spread"]
    return f"{values[f'{kind}_ratio']:.2f} ({low:.2f}-{high:.2f})"


def _throughput(cases: Sequence[Mapping[str, Any]]) -> Table:
    systems = list(cases[0]["systems"])
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        found = case["systems"]
        best = max((name for name in found if name != HALF), key=lambda name: found[name]["step_ratio"])
        rows.append(
            (
                _case(case), found[UNSHARED]["tokens_per_second"],
                *(_ratio(found[name], "step") for name in systems if name != UNSHARED), best,
            )
        )  # fmt: skip
    others = [name for name in systems if name != UNSHARED]
    return Table("throughput", ("case", "unshared tokens/s", *others, "fastest"), rows)


def _cache(cases: Sequence[Mapping[str, Any]]) -> Table:
    """Peaks as measured, K/V and gradient accumulators together."""
    caching = [name for name in ("paged", "radix", "psrl", HALF) if name in cases[0]["systems"]]
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        peaks = {name: case["systems"][name]["kv_bytes_measured"] for name in caching}
        others = [peaks[name] for name in ("paged", "radix") if peaks.get(name)]
        shares = [f"{peaks[name] / min(others):.0%}" if others else "" for name in ("psrl", HALF) if name in peaks]
        half = case["systems"].get(HALF, {"kv_bytes_moved": 0, "recomputed_tokens": 0})
        extra = (half["kv_bytes_moved"] / 2**20, half["recomputed_tokens"])
        kept = case["systems"]["psrl"]["attention_bytes"] / 2**20 if "psrl" in peaks else 0.0
        rows.append((_case(case), *(peak / 2**20 for peak in peaks.values()), ", ".join(shares), kept, *extra))
    names = (*(f"{name}, MiB" for name in caching), "psrl's share of the least", "attention kept by psrl, MiB")
    return Table("cache", ("case", *names, f"{HALF} moved, MiB", "computed again"), rows)


def _phases(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        for name in (UNSHARED, "psrl"):
            medians = case["systems"][name]["medians"]
            shares = [f"{medians[p] / medians['step']:.0%}" for p in ("old_log_prob", "ref", "update")]
            rows.append((_case(case), name, medians["step"], *shares))
    return Table("phases", ("case", "system", "seconds", "old log-prob", "reference", "update"), rows)


def _bytes(cases: Sequence[Mapping[str, Any]]) -> Table:
    """A column a case, K/V peaks of an update and of a forward-only phase."""
    rows: list[tuple[Cell, ...]] = []
    for name in cases[0]["systems"]:
        found = [case["systems"][name] for case in cases]
        rows.append((name, *(f"{v['kv_peak'] / 2**20:,.0f} / {v['kv_peak_forward'] / 2**20:,.0f}" for v in found)))
    return Table("bytes", ("MiB", *(_case(case) for case in cases)), rows)


def _kv(cases: Sequence[Mapping[str, Any]]) -> Table:
    names = list(cases[0]["systems"])
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        found = case["systems"]
        rows += [
            (
                _case(case), name, found[name]["kv_peak"] / 2**20,
                found[name]["kv_peak_forward"] / 2**20,
                found[name]["peak"] / 2**20, _over(found[name]["kv_peak"], found["psrl"]["kv_peak"]),
                found[name]["tokens_computed"], found[name]["largest_micro_batch"],
            )
            for name in names
        ]  # fmt: skip
    header = (
        "case",
        "system",
        "KV peak MiB",
        "in forward-only phases",
        "with gradients MiB",
        "KV over psrl's",
        "tokens computed",
        "largest micro-batch",
    )
    return Table("kv_peak", header, rows)


def _over(value: int, other: int) -> Cell:
    return value / other if other else "-"


def _ablations(record: Mapping[str, Any]) -> Table:
    found = record["ablations"]["systems"]
    rows = [
        (
            name, _ratio(values, "step"), _ratio(values, "update"), values["tokens_computed"], values["micro_batches"],
            values["kv_bytes_measured"], values["kv_bytes_predicted"], f"{values['gradient_error']:.0e}",
        )
        for name, values in found.items()
    ]  # fmt: skip
    header = (
        "system",
        "step, speed over psrl",
        "update",
        "tokens computed",
        "forwards",
        "cache bytes",
        "predicted",
        "gradient difference",
    )
    return Table("ablations", header, rows)


def _latency(systems: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in ("psrl", "no_token_wise"):
        gaps = [g for repeat in systems[name]["micro_batch_seconds"] for g in repeat]
        if len(gaps) < 2:
            continue
        middle = statistics.median(gaps)
        deviation = statistics.pstdev(gaps) / statistics.mean(gaps)
        rows.append((name, len(gaps), 1000 * middle, 1000 * max(gaps), max(gaps) / middle, deviation))
    return Table(
        "latency", ("system", "executions", "median ms", "largest ms", "largest / median", "deviation / mean"), rows
    )


def _evenness(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in ("psrl", "no_token_wise", "no_self_sharing", "tree_packing"):
        found = [case["systems"][name] for case in cases]
        rows.append((name, *(f"{v['spread_by_flops']:.2f}, {v['largest_micro_batch']:,}" for v in found)))
    return Table("evenness", ("system", *(_case(case) for case in cases)), rows)


def _lengths(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            f"{case['factor']}x", case["longest"], case["systems"][UNSHARED]["tokens_per_second"],
            _ratio(case["systems"]["tree_packing"], "step"), _ratio(case["systems"]["psrl"], "step"),
        )
        for case in cases
    ]  # fmt: skip
    return Table("lengths", ("length", "longest sample", "unshared tokens/s", "tree_packing", "psrl"), rows)


def _ranks(cases: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            c["ranks"], c["rows"], c["speedup"], c["imbalance_upstream"], c["imbalance"], c["split_groups_upstream"],
            c["split_groups"], c["critical_path_gain"],
        )
        for c in cases
    ]  # fmt: skip
    header = (
        "ranks",
        "rows",
        "speed-up",
        "imbalance, veRL's order",
        "psrl's",
        "split groups, veRL's",
        "psrl's",
        "placement gain",
    )
    return Table("ranks", header, rows)
