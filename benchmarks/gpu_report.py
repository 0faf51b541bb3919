"""The report of a GPU session: which targets were met, tables, and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay import MIN_SHARE_OF_IDEAL, PHASES, Run, markdown
from step import ERRORS, MAX_ERROR_RATIO, error_table, phase_table, table

MIN_ATTENTION_RATE = 0.6
"""Of flash attention's TFLOP/s on visible pairs."""


def targets_of(parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every target of the parts that left results, with ``value`` (None: not measured) and ``is_met``.

    On the CPU ``triton`` runs in its interpreter, if at all, and has no targets.
    """
    found: list[dict[str, Any]] = []

    def add(name: str, value: float | None, wanted: str, is_met: bool) -> None:
        found.append({"name": name, "value": value, "wanted": wanted, "is_met": is_met})

    attention, step = (parts.get(name, {}).get("result") or {} for name in ("attention", "step"))
    for workload, values in attention.get("workloads", {}).items() if attention.get("device") != "cpu" else ():
        row = values["backends"].get("triton", {})
        for key, label in (("forward_rate", "forward"), ("step_rate", "forward and backward")):
            name, rate = f"triton on {workload}, {label}, of flash-attn's TFLOP/s", row.get(key)
            add(name, rate, f">= {MIN_ATTENTION_RATE}", rate is not None and rate >= MIN_ATTENTION_RATE)
    for trace, record in step.get("runs", {}).items():
        share = record["update"]["speedup"] / record["update"]["ideal_speedup"]
        add(f"update of {trace}, of ideal", share, f">= {MIN_SHARE_OF_IDEAL}", share >= MIN_SHARE_OF_IDEAL)
    for trace, kinds in step.get("bfloat16_errors", {}).items():
        for kind, values in kinds.items():
            name = f"bfloat16 error of {ERRORS[kind]} on {trace}, over the unshared one's"
            add(name, values["ratio"], f"<= {MAX_ERROR_RATIO}", values["ratio"] <= MAX_ERROR_RATIO)
    return found


def write_report(session: Mapping[str, Any], out: Path) -> None:
    """``report.md`` and its plots in ``out``. What a failed part did not leave is left out, and said."""
    plots = draw_plots(session["parts"], out)
    text = ["# GPU session"]
    if session["is_toy"]:
        text.append("Toy sizes on the CPU: that the session works, no figures of a GPU.")
    text += ["## Parts", _parts(session["parts"])]
    if session["targets"]:
        text += ["## Targets", _targets(session["targets"])]
    results = {name: part["result"] for name, part in session["parts"].items() if part["result"] is not None}
    if "doctor" in results:
        text += ["## Doctor", _doctor(results["doctor"])]
    if "tune" in results:
        text += ["## Tiles", "```\n" + "\n".join(results["tune"]) + "\n```"]
    if "attention" in results:
        text += [
            "## Attention",
            f"{results['attention']['device']}, torch {results['attention']['torch']}, "
            f"tiles: {results['attention']['tiles']}.",
        ]
        text += [_attention(results["attention"]), _paths(results["attention"])]
    if "step" in results:
        runs = [Run(name, record, False, "speedup") for name, record in results["step"]["runs"].items()]
        text += ["## Phases", _step_intro(results["step"]), markdown(runs), phase_table(runs)]
        text += [error_table(results["step"]["bfloat16_errors"])]
    text += [f"![{name}]({path.name})" for name, path in plots.items()]
    (out / "report.md").write_text("\n\n".join(text) + "\n")


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return table([header, ["---"] * len(header), *([str(cell) for cell in row] for row in rows)])


def _parts(parts: Mapping[str, Mapping[str, Any]]) -> str:
    def found(name: str, part: Mapping[str, Any]) -> str:
        if part["failure"]:
            return f"**failed**: {part['failure']}; see {name}.log and {name}.err"
        result = part["result"]
        return f"{result['passed']} passed, {result['skipped']} skipped" if name == "tests" else "done"

    rows = [(name, f"{part['seconds']:.0f}", found(name, part)) for name, part in parts.items()]
    return _table(("part", "seconds", ""), rows)


def _targets(targets: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            t["name"], t["wanted"], "not measured" if t["value"] is None else f"{t['value']:.3f}",
            "met" if t["is_met"] else "**missed**",
        )
        for t in targets
    ]  # fmt: skip
    return _table(("target", "wanted", "measured", ""), rows)


def _doctor(findings: Sequence[Mapping[str, Any]]) -> str:
    cell = lambda text: str(text).replace("|", "/").replace("\n", " ")  # noqa: E731
    rows = [[cell(f[key]) for key in ("section", "name", "state", "detail")] for f in findings]
    return _table(("section", "name", "state", "found"), rows)


def _attention(result: Mapping[str, Any]) -> str:
    columns = ("forward_ms", "forward_tflops", "forward_rate", "step_ms", "step_tflops", "step_rate", "peak_bytes")
    rows: list[Sequence[Any]] = []
    for workload, values in result["workloads"].items():
        for backend, row in values["backends"].items():
            if "unsupported" in row:
                rows.append((workload, backend, row["unsupported"], *[""] * (len(columns) - 1)))
            else:
                rows.append((workload, backend, *(f"{row[c]:.4g}" if c in row else "-" for c in columns)))
    return _table(("forest", "backend", *columns), rows)


def _paths(result: Mapping[str, Any]) -> str:
    """Where both ways of reading a cached path ran."""
    rows: list[Sequence[Any]] = []
    for workload, values in result["workloads"].items():
        ways = [values["backends"].get(way, {}) for way in ("in_place", "gathered")]
        if all("step_ms" in way for way in ways):
            in_place, gathered = ways
            ratios = [f"{in_place[f'{part}_over_gathered']:.3f}" for part in ("forward", "step")]
            kept = [f"{way.get(key, '-')}" for key in ("saved_bytes", "peak_bytes") for way in (gathered, in_place)]
            rows.append((workload, *ratios, *kept))
    if not rows:
        return "The cached path was not read both ways."
    header = ("cached path: speed-up of in place over gathered", "forward", "forward and backward")
    bytes_of = [f"{kind} bytes, {way}" for kind in ("saved", "peak") for way in ("gathered", "in place")]
    return _table((*header, *bytes_of), rows)


def _step_intro(result: Mapping[str, Any]) -> str:
    return (
        f"{result['model']} with random weights on {result['device']}; without sharing {result['unshared_attention']} "
        "attends. A cell is speed-up / ideal (share of it). Seconds are medians, MiB peaks beside weights, gradients "
        "and optimizer (on the CPU: unknown)."
    )


# -------------------------------------------------------------------------------------------------------------- plots
def draw_plots(parts: Mapping[str, Mapping[str, Any]], out: Path) -> dict[str, Path]:
    """PNG files of what the parts left, by title."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
        "attention": ("attention: TFLOP/s on visible pairs, forward and backward", _draw_attention),
        "step": ("phases: speed-up over veRL's packed path", _draw_step),
    }
    files: dict[str, Path] = {}
    for name, (title, function) in draw.items():
        result = parts.get(name, {}).get("result")
        if result is None:
            continue
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        function(axes, result)
        axes.set_title(title, fontsize=10)
        files[title] = out / f"{name}.png"
        figure.savefig(files[title], dpi=120, metadata={"Software": None})
        plt.close(figure)
    return files


def _draw_attention(axes: Any, result: Mapping[str, Any]) -> None:
    workloads = result["workloads"]
    rows = [values["backends"] for values in workloads.values()]
    backends = [name for name in rows[0] if any("step_tflops" in row[name] for row in rows)]
    width = 0.8 / len(backends)
    for number, backend in enumerate(backends):
        rates = [row[backend].get("step_tflops", 0.0) for row in rows]
        axes.bar([i + number * width for i in range(len(workloads))], rates, width, label=backend)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(workloads))], list(workloads))
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=8)


def _draw_step(axes: Any, result: Mapping[str, Any]) -> None:
    bars = [
        (f"{trace}\n{label}", record[phase]["speedup"], record[phase]["ideal_speedup"])
        for trace, record in result["runs"].items()
        for phase, label in PHASES.items()
    ]
    names, speedups, ideals = zip(*bars, strict=True)
    axes.bar(range(len(bars)), ideals, 0.8, color="lightgrey", label="ideal (FLOPs)")
    axes.bar(range(len(bars)), speedups, 0.5, label="measured")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(bars)), names, fontsize=7)
    axes.set_ylabel("speed-up")
    axes.legend(fontsize=8)
