"""The Markdown page of a benchmark: tables, plots, the paper's figures beside what was measured, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psrl.bench.options import HALF
from psrl.bench.plans import WAVES
from psrl.bench.tables import Table
from psrl.systems import SYSTEMS, UNSHARED

_INTRO = """# Evaluation

Made by `psrl bench` from what it measured, counted or simulated; edit `psrl/bench/page.py`, not this file.

```
{command}
```

psrl {version} on {processor}, Python {python}. Measured: a random model of {layers} layers, hidden size {hidden},
{dtype}, micro-batches of {max_tokens} tokens; one mini-batch of all samples, old log-prob, reference and update;
{repeat} runs of every system in turn in one process; {clock} time. Ratios are medians over runs, with the least and the
largest. They say how systems compare in this engine on this machine, not how fast a GPU is. Counted: plans for {shape}
in bfloat16. Simulated: {simulated_model} with the calibration {calibration}.
"""

_SHOWN = ("dtype", "max_tokens", "repeat", "clock", "shape", "simulated_model", "calibration")

_DIFFERENCES = """## What differs from the paper, and why

- **Match rates** are those of other trajectories: recorded or scripted agents, cut by `--limit` and `--turns` where the
  command says so. Fewer turns and fewer trials of a task repeat less.
- **Throughput.** The paper measures large models on GPUs, where GEMMs of a micro-batch are efficient and launches cheap
  beside them. A small random model on a CPU pays for every micro-batch, cached block and sample in Python, and all
  systems here share one engine: no serving engine's kernels, no system's own overheads. A ratio near 1 between
  two systems means that they compute about as much.
- **`paged` and `radix`** here are the caches' policies, not vLLM and SGLang: `paged` shares whole pages only and
  computes the rest of a page again, both keep every token's K/V to the end of the mini-batch. The paper's ratio to
  veRL's memory counts everything that is on a GPU; the bytes here are K/V and their gradients alone, of which veRL has
  none.
- **Samples longer than a micro-batch that share little** gain little: `unshared` and `tree_packing` run each in one
  micro-batch of its own, however long it is. psrl keeps to `--max-tokens`: it cuts such a sample and runs all but its
  end forward once more, without its attention. That saves the memory of activations. With `psrl.max_tokens` as long as
  the sample nothing is computed twice.
- **`radix` divides the work as psrl does** and computes as many tokens; it keeps K/V longer, and does not keep
  attention of the spine for its second forward. Where the spine is small, what is left between the two, either way,
  is what repeats of one system differ by.
- **K/V peak.** Pass 1 of an update runs the whole spine before pass 2 frees any of it, so without a budget psrl's peak
  is about that of its spine, whenever blocks are freed: freeing early shortens the time at the peak, and lowers the
  peak where a budget (`psrl.kv_cache_bytes`) cuts the update into waves. *psrl in waves* is the least of 75, 50, 35,
  25, 15 and 10 % of the peak under which the mini-batch can still be planned; it computes nothing more often.
- **`tree_packing`** has no cache and a sample that is longer than the budget runs in one micro-batch of its own, so its
  largest micro-batch, and with it the activations, may exceed `--max-tokens`, and such samples share nothing. With a
  budget of several samples it shares most of what psrl shares, and where all fit one micro-batch it computes the same.
  `no_self_sharing` exceeds the budget too, where a run of tokens is longer.
- **Group-intact placement** only acts on several ranks, so it is in the table of ranks; sharing between micro-batches
  off is `tree_packing`.
"""


def make_page(record: Mapping[str, Any], tables: Sequence[Table], plots: Mapping[str, Path]) -> str:
    """
    Args:
        plots: files by plot, in ``img`` beside the page.
    """
    by_name = {table.name: table for table in tables}
    options = record["options"]
    intro = _INTRO.format(
        command=record["command"], version=record["psrl_version"], **record["machine"], **options["tiny"],
        **{key: options[key] for key in _SHOWN},
    )  # fmt: skip

    def image(name: str, text: str) -> str:
        return f"![{text}](img/{plots[name].name})"

    parts = [
        intro,
        f"{options['note']}\n" if options["note"] else "",
        "## Beside the paper\n", _beside(record), "",
        "## Samples\n", by_name["cases"].markdown(), "",
        "## Throughput\n", "Over `unshared`, veRL's own path.\n", by_name["throughput"].markdown(), "",
        _wins(record), "",
        image("throughput", "Throughput by system"), "",
        "Most bytes that the caches held, K/V and gradient accumulators. *psrl_half* is psrl with a budget "
        "(`psrl.kv_cache_bytes`) of half of what the lesser of `paged` and `radix` takes, where others hold that "
        "much: it keeps to it in waves, else by moving layers to host memory and back, or by computing prefixes again, "
        "whichever costs less. The shares are psrl's and psrl_half's. What psrl keeps of attention between the passes "
        "of an update comes on top of its bytes of K/V, but not of psrl_half's: a budget holds both.\n",
        by_name["cache"].markdown(), "",
        "Where a step's time goes:\n", by_name["phases"].markdown(), "",
        "## K/V bytes\n",
        f"Peaks of the K/V of an update / of a forward-only phase, in plans for the first {options['counted_rows']} "
        "rows of each trace with all their turns. *blocks of N*: psrl with fixed blocks, freed with their last "
        "reader.\n",
        by_name["bytes"].markdown(), "",
        "More of it is in `kv_peak.csv`: gradient accumulators, tokens computed, the largest micro-batch.\n",
        image("kv_over_time", "Cached K/V over an update"), "",
        "## Without one mechanism\n",
        f"{record['ablations']['trace']}, {record['ablations']['strategy']}; speeds are relative to psrl with all of "
        "them, gradient differences to it, relative to each tensor's largest value.\n",
        by_name["ablations"].markdown(), "",
        *(f"- `{name}`: {SYSTEMS[name].stands_for}." for name in record["ablations"]["systems"]), "",
        "Micro-batches of the update, with and without micro-batches by tokens:\n", by_name["latency"].markdown(), "",
        "Deviation over mean of the FLOPs of an update's micro-batches, and tokens of the largest, in plans for the "
        "rows of the K/V bytes:\n",
        by_name["evenness"].markdown(), "",
        "## Longer sequences\n", "Made-up step-wise samples whose turns are so many times as long, over `unshared`.\n",
        by_name["lengths"].markdown(), "", image("lengths", "Throughput by sequence length"), "",
        "## Ranks and balance\n",
        "Predicted. The trace of the ablations once for every data-parallel rank. Imbalance is the busiest rank's work "
        "over the mean; placement gain is the busiest rank's work in veRL's order of rows, prefixes shared, over that "
        "in psrl's.\n",
        by_name["ranks"].markdown(), "", image("ranks", "Speed-up by ranks"), "",
        _DIFFERENCES,
    ]  # fmt: skip
    return "\n".join(parts)


def _beside(record: Mapping[str, Any]) -> str:
    ratios = [case["systems"]["psrl"]["step_ratio"] for case in record["throughput"]]
    rates = [f"{c['trace']} {c['strategy']} {1 - c['unique_tokens'] / c['tokens']:.2%}" for c in record["bytes"]]
    rows = [
        ("throughput over veRL", "1.2x to 5.2x", f"{min(ratios):.2f}x to {max(ratios):.2f}x"),
        ("over SGLang-PS, long agent", "3.8x", _over_radix(record)),
        ("K/V peak with dynamic caching, update", "-54 %", _saved(record, "psrl", "kv_peak")),
        ("the same, update in waves", "", _saved(record, WAVES, "kv_peak")),
        ("the same, forward-only phases", "", _saved(record, "psrl", "kv_peak_forward")),
        ("vLLM-PS's memory", "2 to 10 times veRL's", _times(record, "paged")),
        ("SGLang-PS's memory", "2 to 10 times veRL's", _times(record, "radix")),
        ("match rates", "94.51 %, 90.22 %, 88.92 %, 62.24 %", "; ".join(rates)),
    ]
    return Table("beside", ("", "paper", "here"), list(rows)).markdown()


def _saved(record: Mapping[str, Any], name: str, kind: str) -> str:
    """K/V peak of a system beside that of psrl with blocks that stay to the end."""
    found = [(case["systems"][name][kind], case["systems"]["no_dynamic_cache"][kind]) for case in record["bytes"]]
    return _range([own / kept - 1 for own, kept in found if kept], "{:+.0%}")


def _over_radix(record: Mapping[str, Any]) -> str:
    """On the case with one sample a turn whose samples are longest."""
    per_turn = [case for case in record["throughput"] if case["strategy"] == "step"]
    case = max(
        per_turn or record["throughput"],
        key=lambda c: next(x["mean"] for x in record["cases"] if _key(x) == _key(c)),
    )
    if "radix" not in case["systems"]:
        return "not measured"
    ratio = case["systems"]["psrl"]["step_ratio"] / case["systems"]["radix"]["step_ratio"]
    return f"{ratio:.2f}x on {case['trace']} {case['strategy']}"


def _name(case: Mapping[str, Any]) -> str:
    return f"{case['trace']}, {case['strategy']}"


def _key(case: Mapping[str, Any]) -> tuple[str, str]:
    return case["trace"], case["strategy"]


def _over(case: Mapping[str, Any], name: str) -> float:
    """K/V peak of a system over psrl's, 0 where psrl keeps nothing."""
    own = case["systems"]["psrl"]["kv_peak"]
    return case["systems"][name]["kv_peak"] / own if own else 0.0


def _times(record: Mapping[str, Any], name: str) -> str:
    return (
        _range([x for x in (_over(case, name) for case in record["bytes"]) if x], "{:.1f}") + " times psrl's K/V peak"
    )


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "nothing is cached at this budget"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _wins(record: Mapping[str, Any]) -> str:
    """Where another system is at least as fast as psrl, from the medians."""
    lost = [
        f"- made-up sequences, {case['factor']}x: `tree_packing` "
        f"({case['systems']['tree_packing']['step_ratio'] / case['systems']['psrl']['step_ratio']:.2f} times psrl)."
        for case in record["lengths"]
        if case["systems"]["tree_packing"]["step_ratio"] >= case["systems"]["psrl"]["step_ratio"]
    ] + [
        f"- {_name(record['ablations'])}: `{name}` ({values['step_ratio']:.2f} times psrl)."
        for name, values in record["ablations"]["systems"].items()
        if name != "psrl" and values["step_ratio"] >= 1.0
    ]
    for case in record["throughput"]:
        own = case["systems"]["psrl"]["step_ratio"]
        better = [
            f"`{name}` ({values['step_ratio'] / own:.2f} times psrl)"
            for name, values in case["systems"].items()
            if name not in ("psrl", HALF) and (1.0 if name == UNSHARED else values["step_ratio"]) >= own
        ]
        if better:
            lost.append(f"- {_name(case)}: {', '.join(better)}.")
    if not lost:
        return "By medians psrl is the fastest everywhere, below too."
    return "\n".join(["By medians psrl is the fastest everywhere, below too, but for:\n", *lost])
