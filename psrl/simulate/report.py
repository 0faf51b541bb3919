"""The results of a simulation as JSON values and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from psrl import __version__
from psrl.console import table_console
from psrl.simulate.options import SimulateOptions
from psrl.simulate.phases import PHASES, PhaseResult
from psrl.simulate.sides import SHARED, UNSHARED

if TYPE_CHECKING:
    from psrl.simulate.job import SideResult, Simulation

PHASE_NAMES = {"old_log_prob": "old log-prob", "ref": "reference", "update": "update"}
SHARES = ("compute", "exchange", "bubble", "contention", "wait", "gradients", "optimizer")
_GIB = 1 << 30


def make_record(options: SimulateOptions, simulation: Simulation) -> dict[str, Any]:
    """Everything that was found, as JSON values. Seconds are predictions but for those named ``..._here``."""
    trace, costs = simulation.trace, simulation.costs
    calibration, layout = costs.calibration, costs.layout
    sides = {name: _side_record(side, simulation) for name, side in simulation.sides.items()}
    record: dict[str, Any] = {
        "psrl_version": __version__,
        "options": options.for_report(),
        "calibration": {"name": calibration.name, "source": calibration.source, "note": calibration.note},
        "layout": {**asdict(layout), "data": layout.data},
        "model": {**asdict(costs.model), "parameters": costs.model.num_parameters},
        "rows": trace.num_rows,
        "padding_rows": int(trace.is_padding_S.sum()),
        "tokens": trace.num_tokens,
        "sides": sides,
        "speedup": None,
    }
    if len(sides) == 2:
        ours, theirs = sides[SHARED], sides[UNSHARED]
        record["speedup"] = {
            **{phase: theirs["phases"][phase]["seconds"] / ours["phases"][phase]["seconds"] for phase in PHASES},
            "step": theirs["step_seconds"] / ours["step_seconds"],
        }
    return record


def _side_record(side: SideResult, simulation: Simulation) -> dict[str, Any]:
    workload, num_ranks = side.workload, simulation.costs.layout.num_ranks
    cells = [batch for rank in workload.update for batch in rank]
    limit = simulation.costs.calibration.device_bytes
    stats = [batch.stats for batch in cells if batch.stats is not None]
    tokens, total = simulation.trace.num_tokens, side.memory.total
    return {
        "step_seconds": side.step_seconds,
        "tokens_per_second": tokens / side.step_seconds,
        "tokens_per_second_per_rank": tokens / side.step_seconds / num_ranks,
        "phases": {phase: _phase_record(side.phases[phase], tokens) for phase in PHASES},
        "memory": {**asdict(side.memory), "total": total, "fits": limit is None or total <= limit},
        "placement": {
            "imbalance": workload.placement.imbalance,
            "split_groups": workload.placement.num_split_groups,
            "seconds_here": workload.placement_seconds,
        },
        "planning_seconds_here": workload.planning_seconds,
        "tokens_computed": sum(s.unique_tokens for s in stats) if stats else sum(b.num_tokens for b in cells),
        "spine_tokens": sum(s.spine_tokens for s in stats),
        "ideal_speedup": sum(s.flops_unshared for s in stats) / sum(s.flops_shared for s in stats) if stats else 1.0,
    }  # fmt: skip


def _phase_record(phase: PhaseResult, tokens: int) -> dict[str, Any]:
    return {
        "seconds": phase.seconds,
        "tokens_per_second": phase.tokens_per_second(tokens),
        "balance": phase.balance,
        "micro_batches": phase.num_micro_batches,
        "shares": {name: getattr(phase, name) for name in SHARES},
    }


# ------------------------------------------------------------------------------------------------------------- tables
def print_record(record: Mapping[str, Any]) -> None:
    """Print the tables to stdout."""
    console = table_console()
    sides = record["sides"]
    parts: list[Any] = [_headline(record), _phases(sides)]
    if record["speedup"] is not None:
        parts.append(_speedup(record["speedup"]))
    parts += [_memory(sides), _workload(sides)]
    source = record["calibration"]
    parts.append(f"Calibration {source['name']} ({source['source']}): {source['note']}")
    console.print(Group(*parts))


def _headline(record: Mapping[str, Any]) -> str:
    layout, model = record["layout"], record["model"]
    sizes = " x ".join(
        f"{short} {layout[name]}"
        for short, name in (("TP", "tensor"), ("CP", "context"), ("PP", "pipeline"), ("DP", "data"))
    )
    extra = "".join(
        f", {short} {layout[name]}" for short, name in (("VPP", "chunks"), ("EP", "expert")) if layout[name] > 1
    )
    return (
        f"{model['name']} ({model['parameters'] / 1e9:.1f} B parameters) on {layout['num_ranks']} ranks: {sizes}{extra}"
        f"; {record['rows']:,} rows ({record['padding_rows']:,} padding), {record['tokens']:,} tokens, predicted"
    )


def _phases(sides: Mapping[str, Any]) -> Table:
    table = _table("side", "phase")
    for name in ("seconds", "tokens/s", "balance", "micro-batches", *SHARES):
        table.add_column(name, justify="right", no_wrap=True)
    for side, values in sides.items():
        for phase in PHASES:
            found = values["phases"][phase]
            table.add_row(
                side,
                PHASE_NAMES[phase],
                f"{found['seconds']:.3f}",
                f"{found['tokens_per_second']:,.0f}",
                f"{found['balance']:.2f}",
                f"{found['micro_batches']:,}",
                *(f"{found['shares'][name]:.1%}" for name in SHARES),
            )
        table.add_row(side, "step", f"{values['step_seconds']:.3f}", f"{values['tokens_per_second']:,.0f}")
    return table


def _speedup(speedup: Mapping[str, float]) -> str:
    parts = [f"{PHASE_NAMES.get(name, name)} {value:.2f}x" for name, value in speedup.items()]
    return "Speed-up over veRL without sharing: " + ", ".join(parts)


def _memory(sides: Mapping[str, Any]) -> Table:
    names = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "total")
    table = _table("GiB a rank")
    for name in (*names, "fits"):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for side, values in sides.items():
        memory = values["memory"]
        table.add_row(side, *(f"{memory[name] / _GIB:.2f}" for name in names), "yes" if memory["fits"] else "NO")
    return table


def _workload(sides: Mapping[str, Any]) -> Table:
    table = _table("update")
    for name in ("tokens computed", "spine tokens", "ideal", "imbalance", "split groups", "placed in", "planned in"):
        table.add_column(name, justify="right", no_wrap=True)
    for side, values in sides.items():
        placement = values["placement"]
        table.add_row(
            side,
            f"{values['tokens_computed']:,}",
            f"{values['spine_tokens']:,}",
            f"{values['ideal_speedup']:.2f}x",
            f"{placement['imbalance']:.3f}",
            f"{placement['split_groups']:,}",
            f"{placement['seconds_here']:.2f} s",
            f"{values['planning_seconds_here']:.3f} s",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
