"""Plots of a benchmark, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError
from psrl.systems import UNSHARED


def draw_plots(record: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write every plot. Returns the files by plot.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'psrl[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
        "throughput": _throughput,
        "kv_over_time": _kv_over_time,
        "lengths": _lengths,
        "ranks": _ranks,
    }
    files: dict[str, Path] = {}
    for name, function in draw.items():
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        function(axes, record)
        files[name] = folder / f"bench_{name}.png"
        figure.savefig(files[name], dpi=120, metadata={"Software": None})
        plt.close(figure)
    return files


def _throughput(axes: Any, record: Mapping[str, Any]) -> None:
    cases = record["throughput"]
    systems = [name for name in cases[0]["systems"] if name != UNSHARED]
    width = 0.8 / len(systems)
    for number, name in enumerate(systems):
        found = [case["systems"][name] for case in cases]
        ratios = [values["step_ratio"] for values in found]
        spread = [
            [max(0.0, r - v["step_ratio_spread"][0]) for r, v in zip(ratios, found, strict=True)],
            [max(0.0, v["step_ratio_spread"][1] - r) for r, v in zip(ratios, found, strict=True)],
        ]
        axes.bar([i + number * width for i in range(len(cases))], ratios, width, yerr=spread, label=name, capsize=2)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    labels = [f"{case['trace']}\n{case['strategy']}" for case in cases]
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], labels, fontsize=7, rotation=20)
    axes.set_ylabel("throughput over unshared")
    axes.legend(fontsize=8)


def _kv_over_time(axes: Any, record: Mapping[str, Any]) -> None:
    case = record["bytes"][0]
    for number, (name, curve) in enumerate(case["systems"].items()):
        style = ("-", "--", ":")[number // 5 % 3]
        kv = [b / 2**20 for b in curve["kv_bytes"]]
        axes.step(curve["time"], kv, style, where="pre", label=name, linewidth=1.5, color=f"C{number % 10}")
    axes.set_xlabel("share of the update's FLOPs")
    axes.set_ylabel("cached K/V, MiB")
    axes.set_title(f"{case['trace']} {case['strategy']}, {record['options']['shape']}", fontsize=9)
    axes.legend(fontsize=7)


def _lengths(axes: Any, record: Mapping[str, Any]) -> None:
    cases = record["lengths"]
    for name in ("tree_packing", "psrl"):
        ratios = [case["systems"][name]["step_ratio"] for case in cases]
        axes.plot([case["factor"] for case in cases], ratios, marker="o", label=name)
    axes.set_xlabel("length of the sequences")
    axes.set_ylabel("throughput over unshared")
    axes.legend(fontsize=8)


def _ranks(axes: Any, record: Mapping[str, Any]) -> None:
    cases = record["ranks"]
    ranks = [case["ranks"] for case in cases]
    axes.plot(ranks, [case["speedup"] for case in cases], marker="o", label="psrl over veRL, predicted")
    axes.plot(ranks, [case["critical_path_gain"] for case in cases], marker="s", label="of that placement")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("speed-up")
    axes.legend(fontsize=8)
