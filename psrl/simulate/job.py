"""The simulation job: read, place, plan, time, report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psrl.data import load_samples, load_tokenizer
from psrl.errors import ConfigError, InputError
from psrl.files import check_targets, write_json
from psrl.model_sizes import load_model
from psrl.simulate.calibration import Calibration, load_calibration
from psrl.simulate.costs import CostModel
from psrl.simulate.memory import MemoryUse, peak_memory
from psrl.simulate.options import SimulateOptions
from psrl.simulate.phases import PhaseResult, simulate_phases
from psrl.simulate.report import make_record, print_record
from psrl.simulate.sides import SHARED, UNSHARED, Sides, Workload
from psrl.simulate.trace import SimulatedTrace, make_trace


@dataclass(frozen=True, slots=True)
class SideResult:
    """A side's workload, its phases and its memory."""

    workload: Workload
    phases: dict[str, PhaseResult]
    memory: MemoryUse

    @property
    def step_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())


@dataclass(frozen=True, slots=True)
class Simulation:
    """Results by side: ``psrl`` and, or, ``verl``."""

    trace: SimulatedTrace
    costs: CostModel
    sides: dict[str, SideResult]


def run_simulation(options: SimulateOptions) -> Simulation:
    """Read the trace and simulate a step.

    Raises:
        PSRLError: the input, the model, the calibration or an option is not usable; the message is for the user.
    """
    layout = options.layout
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json {options.json}: there is no folder {options.json.parent}")
    model, calibration = load_model(options.model), load_calibration(options.calibration)
    layout.check_model(model)
    loaded = load_samples(
        options.files,
        tokenizer=lambda: load_tokenizer(options.tokenizer or "bytes"),
        mode=options.mode,
        limit=options.limit,
    )
    trace = make_trace(loaded.samples, multiple=layout.data * options.mini_batches, replicas=options.replicas)
    if trace.is_padding_S.sum() * 2 > trace.num_rows:
        raise ConfigError(
            f"{len(loaded.samples) * options.replicas} rows are too few for {layout.data} data-parallel ranks x "
            f"{options.mini_batches} mini-batches: most rows would be padding; raise --replicas"
        )
    sides = Sides(
        trace,
        model,
        layout,
        calibration.dtype_bytes,
        options.mini_batches,
        options.max_tokens,
        options.infer_max_tokens or options.max_tokens,
        options.kv_cache_bytes,
    )
    return simulate(sides, calibration, options.sharing, options.recompute, options.distributed_optimizer)


def simulate(
    sides: Sides,
    calibration: Calibration,
    sharing: str = "both",
    recompute: str = "none",
    distributed_optimizer: bool = True,
) -> Simulation:
    """Simulate a step of a trace on a layout.

    Args:
        sharing: ``on`` (psrl), ``off`` (veRL) or ``both``.
    """
    costs = CostModel(sides.model, sides.layout, calibration, recompute, distributed_optimizer)
    segments = sides.segments()
    wanted = {"on": (SHARED,), "off": (UNSHARED,), "both": (SHARED, UNSHARED)}[sharing]
    results: dict[str, SideResult] = {}
    for name in wanted:
        workload = sides.shared(segments) if name == SHARED else sides.unshared(segments)
        batches = [*workload.forward, *(batch for rank in workload.update for batch in rank)]
        results[name] = SideResult(workload, simulate_phases(costs, workload), peak_memory(costs, batches))
    return Simulation(sides.trace, costs, results)


def run(options: SimulateOptions) -> None:
    """Simulate, print the tables, write the record.

    Raises:
        PSRLError: see ``run_simulation``.
    """
    check_targets({"--json": options.json}, options.files)
    simulation = run_simulation(options)
    record: dict[str, Any] = make_record(options, simulation)
    if options.json is not None:
        write_json("--json", options.json, record)
    print_record(record)
