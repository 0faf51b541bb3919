"""An analysis as one HTML page. It holds everything it shows, and scripts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from psrl.analyze.report import format_bytes
from psrl.analyze.svg import Series, histogram, line_plot, short_number

STYLE = """
:root { color-scheme: light; --ink: #111827; --soft: #6b7280; --line: #e5e7eb; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
p.soft, figcaption { color: var(--soft); margin: 0 0 8px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px; min-width: 120px; }
.card b { display: block; font-size: 22px; } .card span { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
figure { margin: 0; max-width: 580px; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #6b7280; }
.legend span { margin-right: 14px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; } th { text-align: right; color: var(--soft); font-weight: 500; }
td { text-align: right; border-top: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td, th { padding: 5px 8px; } td.text, th.text { text-align: left; } tr.best { background: #ecfdf5; }
.scroll { overflow-x: auto; }
pre { background: #f9fafb; border: 1px solid var(--line); border-radius: 6px; padding: 10px; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 4px 0 14px; }
pre .a { color: #1d4ed8; } pre .b { color: #b45309; } pre .s { color: var(--soft); }
"""


def make_page(record: Mapping[str, Any]) -> str:
    """The whole document."""
    name = ", ".join(record["options"]["files"])
    body = [
        f"<h1>Prefix sharing in {escape(name)}</h1>",
        f'<p class="soft">{record["samples"]:,} samples, {record["trajectories"]:,} trajectories, '
        f"{record['groups']:,} prompts, {record['mini_batches']:,} mini-batches. psrl {record['psrl_version']}.</p>",
        _cards(record),
        "<h2>What it is worth</h2>",
        _verdict(record),
        _budget_plots(record),
        _budget_table(record),
        "<h2>Where the tokens are</h2>",
        _depth_plot(record["tree"]),
        "<h2>What breaks sharing</h2>",
        _breaks(record),
    ]
    return document(f"psrl analyze: {name}", STYLE, "\n".join(body))


def document(title: str, style: str, body: str) -> str:
    """An HTML document with nothing to fetch."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _cards(record: Mapping[str, Any]) -> str:
    cards = [
        ("tokens", short_number(record["tokens"])),
        ("unique tokens", short_number(record["unique_tokens"])),
        ("match rate", f"{record['prefix_match_rate']:.1%}"),
        ("within a group", f"{record['match_rate_group']:.1%}"),
        ("within a trajectory", f"{record['match_rate_trajectory']:.1%}"),
        ("responses, of all tokens", f"{record['response_share']:.1%}"),
        ("responses, of unique tokens", f"{record['response_share_unique']:.1%}"),
    ]
    inner = "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for name, value in cards)
    return f'<div class="cards">{inner}</div>'


def _verdict(record: Mapping[str, Any]) -> str:
    model, best = record["model"], record["best_budget"]
    if best is None:
        return f"<p>No budget fits {record['options']['memory_gib']:g} GiB.</p>"
    row = next(row for row in record["budgets"] if row["max_tokens"] == best)
    packing = record["tree_packing_of_longest_sample"]
    return (
        f"<p>For {escape(model['name'])} ({model['dtype']}) the best budget is <b>{best:,} tokens</b> a micro-batch: "
        f"an update does <b>1/{row['speedup']:.2f}</b> of the work of independent samples, a forward-only phase "
        f"1/{row['speedup_forward']:.2f}. K/V, their gradients and one micro-batch take "
        f"{format_bytes(row['memory_bytes'])}. Without a cache, micro-batches have to hold the longest sample, "
        f"{packing['max_tokens']:,} tokens ({format_bytes(packing['activation_bytes'])}); tree packing then does "
        f"1/{packing['speedup']:.2f} of the work.</p>"
        '<p class="soft">Predicted from FLOPs. Bytes are those of one rank '
        "that holds the whole model; activations are an estimate without recompute.</p>"
    )


def _budget_plots(record: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = record["budgets"]
    labels = [f"{row['max_tokens']:,}" for row in rows]

    def series(**keys: str) -> list[Series]:
        return [Series(name.replace("_", " "), [row[key] for row in rows]) for name, key in keys.items()]

    speed = line_plot(
        "Speed-up of an update over independent samples",
        labels,
        series(psrl="speedup", tree_packing="speedup_tree_packing"),
        "times",
    )
    tokens = line_plot(
        "Tokens that go through a forward",
        labels,
        series(psrl="computed_tokens_psrl", tree_packing="computed_tokens_tree_packing",
               unshared="computed_tokens_unshared"),
        "tokens",
    )  # fmt: skip
    gib = 1 << 30
    memory = line_plot(
        "Memory",
        labels,
        [
            Series("K/V and gradients, peak", [row["kv_bytes_peak"] / gib for row in rows]),
            Series("one micro-batch (estimate)", [row["activation_bytes"] / gib for row in rows]),
        ],
        "GiB",
    )
    return f'<div class="plots">{speed}{tokens}{memory}</div>'


def _budget_table(record: Mapping[str, Any]) -> str:
    head = (
        "budget", "micro-batches", "spine tokens", "computed: unshared", "tree packing", "psrl", "speed-up",
        "forward only", "over tree packing", "largest micro-batch, tree packing", "KV peak", "activations",
    )  # fmt: skip
    rows = []
    for row in record["budgets"]:
        cells = [
            *(f"{row[key]:,}" for key in (
                "max_tokens", "micro_batches", "spine_tokens", "computed_tokens_unshared",
                "computed_tokens_tree_packing", "computed_tokens_psrl")),
            *(f"{row[key]:.2f}x" for key in ("speedup", "speedup_forward", "speedup_over_tree_packing")),
            f"{row['largest_micro_batch_tree_packing']:,}",
            format_bytes(row["kv_bytes_peak"]),
            format_bytes(row["activation_bytes"]),
        ]  # fmt: skip
        mark = ' class="best"' if row["max_tokens"] == record["best_budget"] else ""
        rows.append(f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _depth_plot(tree: Mapping[str, Any]) -> str:
    by_depth = tree["by_depth"]
    plot = histogram(
        "Tokens by their place in the sample",
        by_depth["edges"],
        [Series("all samples", by_depth["tokens"]), Series("distinct", by_depth["unique_tokens"])],
        "tokens",
        "tokens from the start",
    )
    text = (
        f"A distinct token stands for {tree['tokens_per_unique_token']:.1f} tokens on average. The prefix tree has "
        f"{tree['roots']:,} roots, {tree['forks']:,} forks (the largest has {tree['largest_fork']:,} branches) and "
        f"{tree['leaves']:,} leaves. Samples have {tree['mean_sample']:,.0f} tokens on average, the longest "
        f"{tree['longest_sample']:,}."
    )
    return f'<p>{text}</p><div class="plots">{plot}</div>'


def _breaks(record: Mapping[str, Any]) -> str:
    sampled = f"<p>At {record['sampled_forks']:,} places samples part because the policy chose differently.</p>"
    if not record["breaks"]:
        return sampled + "<p>Nothing else parts them.</p>"
    rows = "".join(
        f'<tr><td class="text">a {row["scope"]}</td><td class="text">{escape(row["kind"])}</td>'
        f'<td>{row["count"]:,}</td><td>{row["lost_tokens"]:,}</td><td class="text">{escape(row["advice"])}</td></tr>'
        for row in record["breaks"]
    )
    head = '<th class="text">within</th><th class="text">what</th><th>places</th><th>tokens lost, at most</th>'
    table = f'<table><thead><tr>{head}<th class="text">what to do</th></tr></thead><tbody>{rows}</tbody></table>'
    return sampled + table + "<h2>Where samples first differ</h2>" + "".join(map(_place, record["worst_breaks"]))


def _place(found: Mapping[str, Any]) -> str:
    first, second = (escape(place) for place in found["places"])
    one, other = (escape(text) for text in found["texts"])
    before = escape(found["before"]) or "(nothing)"
    return (
        f"<div><b>{escape(found['kind'])}</b> within a {found['scope']}: {second} parts from {first} after "
        f'{found["prefix"]:,} shared tokens.<pre><span class="s">{before}</span>\n<span class="a">{one}</span>\n'
        f'<span class="b">{other}</span></pre></div>'
    )
