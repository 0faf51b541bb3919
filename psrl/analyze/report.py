"""An analysis as JSON values and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from psrl import __version__
from psrl.analyze.analysis import Analysis
from psrl.analyze.predict import best_budget
from psrl.console import table_console
from psrl.types import IntArray

NUM_BINS = 48
_SHOWN = 5
_ADVICE = {
    "re-tokenised turn": "keep the token ids that were sampled in the history instead of tokenising its text again",
    "timestamp or id in the context": "move what changes to the end of the prompt, or fix it for a trajectory",
    "left-truncated history": "keep the history whole, or drop old turns in large strides so that several steps share",
    "response removed from the history": "train such steps as they are: what follows a removed thought is not shared",
    "text inserted into the history": "append to the history instead of inserting into it",
    "short edit of the context": "name the tokenizer (--tokenizer) to tell re-tokenised turns from timestamps",
    "different context": "see below where the samples part",
}


def make_record(analysis: Analysis) -> dict[str, Any]:
    """Everything that was found, as JSON values. Bytes are those of one rank that holds the whole model."""
    counts, model = analysis.counts, analysis.model
    forward_unshared = _forward_unshared(analysis)
    best = best_budget(analysis.budgets, analysis.options.memory_bytes)
    return {
        "psrl_version": __version__,
        "options": analysis.options.for_report(),
        "rows": analysis.rows.rows,
        "samples": counts.samples,
        "tokens": counts.tokens,
        "unique_tokens": counts.unique_tokens,
        "prefix_match_rate": _rate(counts.unique_tokens, counts.tokens),
        "match_rate_group": _rate(counts.unique_within_group, counts.tokens),
        "match_rate_trajectory": _rate(counts.unique_within_trajectory, counts.tokens),
        "groups": len(analysis.groups),
        "trajectories": len(analysis.sessions),
        "mini_batches": counts.mini_batches,
        "targets": counts.targets,
        "distinct_targets": counts.distinct_targets,
        "response_share": counts.targets / counts.tokens,
        "response_share_unique": counts.distinct_targets / counts.unique_tokens,
        "tree": _tree_record(analysis),
        "model": {
            "name": model.name,
            "dtype": model.dtype,
            **asdict(model.shape),
            "kv_bytes_per_token": model.footprint.kv_bytes_per_token,
            "grad_bytes_per_token": model.footprint.grad_bytes_per_token,
        },
        "budgets": [row.record(forward_unshared) for row in analysis.budgets],
        "tree_packing_of_longest_sample": {
            "max_tokens": analysis.whole_packing.max_tokens,
            "computed_tokens": analysis.whole_packing.computed_tokens,
            "speedup": analysis.budgets[0].flops_unshared / analysis.whole_packing.flops,
            "activation_bytes": analysis.whole_packing.max_tokens
            * (model.activation_bytes_per_token + model.logit_bytes_per_row),
        },
        "best_budget": None if best is None else best.max_tokens,
        "sampled_forks": analysis.sampled_forks,
        "breaks": _break_records(analysis),
        "worst_breaks": [asdict(b) for b in analysis.worst],
        "breaks_have_text": analysis.has_text,
    }


def _rate(unique: int, tokens: int) -> float:
    return 1.0 - unique / tokens


def _forward_unshared(analysis: Analysis) -> float:
    shape = analysis.model.shape
    lengths = np.concatenate(analysis.lengths)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    return shape.cost(int(lengths.sum()), pairs, int(lengths.sum()))


def _tree_record(analysis: Analysis) -> dict[str, Any]:
    shapes = analysis.shapes
    added = ("roots", "nodes", "leaves", "forks")
    lengths = np.concatenate(analysis.lengths)
    record: dict[str, Any] = {key: sum(shape[key] for shape in shapes) for key in added}
    record["largest_fork"] = max(shape["largest_fork"] for shape in shapes)
    record["longest_sample"] = int(lengths.max())
    record["mean_sample"] = float(lengths.mean())
    record["median_sample"] = float(np.median(lengths))
    record["tokens_per_unique_token"] = analysis.counts.tokens / analysis.counts.unique_tokens
    record["by_depth"] = _by_depth(analysis, lengths)
    return record


def _by_depth(analysis: Analysis, lengths: IntArray) -> dict[str, list[int]]:
    """Tokens of all samples and distinct ones by their place in the sample: edges have one entry more."""
    edges = np.unique(np.linspace(0, lengths.max(), NUM_BINS + 1).astype(np.int64))

    def per_bin(begins: IntArray, sizes: IntArray) -> IntArray:
        ends = begins + sizes
        up_to = [int((np.minimum(ends, edge) - np.minimum(begins, edge)).sum()) for edge in edges.tolist()]
        return np.diff(up_to)

    depths = np.concatenate([d for d, _ in analysis.depth_tokens])
    sizes = np.concatenate([n for _, n in analysis.depth_tokens])
    return {
        "edges": edges.tolist(),
        "tokens": per_bin(np.zeros_like(lengths), lengths).tolist(),
        "unique_tokens": per_bin(depths, sizes).tolist(),
    }


def _break_records(analysis: Analysis) -> list[dict[str, Any]]:
    rows = [
        {
            "scope": scope,
            "kind": kind,
            "count": count,
            "lost_tokens": analysis.lost_by_kind[scope, kind],
            "advice": _ADVICE[kind],
        }
        for (scope, kind), count in analysis.breaks_by_kind.items()
    ]
    return sorted(rows, key=lambda row: -row["lost_tokens"])


# ------------------------------------------------------------------------------------------------------------ tables
def print_record(record: Mapping[str, Any]) -> None:
    """Print the tables to stdout."""
    console = table_console()
    console.print(_figures(record))
    console.print()
    console.print(_budgets(record))
    console.print(_verdict(record))
    if record["breaks"]:
        console.print()
        console.print(_breaks(record["breaks"]))
        for worst in record["worst_breaks"][:_SHOWN]:
            console.print(_where(worst, record["breaks_have_text"], console.encoding))


def _figures(record: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    tree = record["tree"]
    for name, value in (
        ("samples", f"{record['samples']:,}"),
        ("prompts (groups)", f"{record['groups']:,}"),
        ("trajectories", f"{record['trajectories']:,}"),
        ("tokens", f"{record['tokens']:,}"),
        ("unique tokens", f"{record['unique_tokens']:,}"),
        ("match rate", f"{record['prefix_match_rate']:.2%}"),
        ("  within a group only", f"{record['match_rate_group']:.2%}"),
        ("  within a trajectory only", f"{record['match_rate_trajectory']:.2%}"),
        ("responses, of all tokens", f"{record['response_share']:.2%}"),
        ("responses, of unique tokens", f"{record['response_share_unique']:.2%}"),
        ("sample length, mean / longest", f"{tree['mean_sample']:,.0f} / {tree['longest_sample']:,}"),
        ("tree: roots / forks / leaves", f"{tree['roots']:,} / {tree['forks']:,} / {tree['leaves']:,}"),
    ):
        table.add_row(name, value)
    return table


def _budgets(record: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title_justify="left")
    table.title = f"An update of {record['model']['name']}, by tokens of a micro-batch"
    for name in (
        "budget", "micro-batches", "spine tokens", "unshared", "tree packing", "psrl", "speed-up", "forward only",
        "over packing", "KV peak", "kept attention", "activations",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in record["budgets"]:
        mark = "*" if row["max_tokens"] == record["best_budget"] else ""
        table.add_row(
            f"{mark}{row['max_tokens']:,}",
            f"{row['micro_batches']:,}",
            *(f"{row[key]:,}" for key in ("spine_tokens", "computed_tokens_unshared", "computed_tokens_tree_packing",
                                          "computed_tokens_psrl")),
            *(f"{row[key]:.2f}x" for key in ("speedup", "speedup_forward", "speedup_over_tree_packing")),
            format_bytes(row["kv_bytes_peak"]),
            format_bytes(row["attention_bytes"]),
            format_bytes(row["activation_bytes"]),
        )  # fmt: skip
    return table


def _verdict(record: Mapping[str, Any]) -> Text:
    best = record["best_budget"]
    if best is None:
        return Text(f"No budget fits {record['options']['memory_gib']:g} GiB: try smaller ones with --max-tokens.")
    row = next(row for row in record["budgets"] if row["max_tokens"] == best)
    packing = record["tree_packing_of_longest_sample"]
    text = (
        f"* best: {best:,} tokens: an update takes 1/{row['speedup']:.2f} of the FLOPs of independent samples; KV, "
        f"kept attention and one micro-batch take {format_bytes(row['memory_bytes'])} of one rank with the whole "
        f"model. Without a cache, micro-batches have to hold the longest sample, {packing['max_tokens']:,} tokens "
        f"({format_bytes(packing['activation_bytes'])}); tree packing then takes 1/{packing['speedup']:.2f}."
    )
    return Text(text)


def _breaks(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title_justify="left")
    table.title = "What breaks sharing"
    for name, justify in (("within", "left"), ("what", "left"), ("places", "right"), ("tokens lost, at most", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("what to do")
    for row in rows:
        table.add_row(f"a {row['scope']}", row["kind"], f"{row['count']:,}", f"{row['lost_tokens']:,}", row["advice"])
    return table


def _where(found: Mapping[str, Any], has_text: bool, encoding: str) -> Text:
    """One place, as text: what is shared, then the two ways on. What the terminal cannot show is escaped."""
    first, second = found["places"]
    lines = [
        f"\n{found['kind']}: {second} parts from {first} after {found['prefix']:,} shared tokens",
        f"  shared  … {found['before']}" if found["before"] else "  nothing is shared",
        f"  one     {found['texts'][0]}",
        f"  other   {found['texts'][1]}",
    ]
    if not has_text:
        lines.append("  (token ids: name the tokenizer with --tokenizer to see text)")
    return Text("\n".join(lines).encode(encoding, "backslashreplace").decode(encoding))


def format_bytes(value: int) -> str:
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if unit != "B" else f"{value} B"
