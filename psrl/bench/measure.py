"""Systems run in turn on the same samples in one process: seconds, gradients and bytes of each."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from psrl.bench.options import HALF, BenchOptions
from psrl.bench.plans import half_budget
from psrl.cost import KVFootprint
from psrl.data import ReplaySample
from psrl.integrations.megatron.shape import cached_values, model_shape
from psrl.replay.clock import Seconds, now
from psrl.replay.compare import worst_gradient
from psrl.replay.job import prepare_model
from psrl.replay.model import vocabulary_for
from psrl.replay.options import ReplayOptions
from psrl.replay.phases import PHASES, UPDATE, PhaseRunner
from psrl.replay.progress import Progress
from psrl.replay.ranks import Ranks
from psrl.replay.side import Side, build_side
from psrl.systems import UNSHARED

_HOST_BYTES = 1 << 40
"""Budget of the host tier: taken as needed."""


class Stopwatch(Progress):
    """Notes when the micro-batches of an update begin."""

    def __init__(self, total: int, repeats: int) -> None:
        super().__init__(total, repeats)
        self.begins: dict[str, list[list[Seconds]]] = {}
        """Of every repeat, by system."""
        self._current: list[Seconds] | None = None

    @contextlib.contextmanager
    def task(self, name: str, side: str, repeat: int = 0) -> Iterator[None]:
        if name == UPDATE:
            self._current = []
            self.begins.setdefault(side, []).append(self._current)
        with super().task(name, side, repeat):
            yield
        self._current = None

    def micro_batch(self, number: int) -> None:
        if self._current is not None:
            self._current.append(now())
        super().micro_batch(number)


class Bench:
    """Sides of all systems on one random model with a learning rate of 0, so that every case finds equal weights."""

    def __init__(
        self,
        options: BenchOptions,
        systems: Sequence[str],
        largest: ReplaySample,
        longest: ReplaySample,
        scratch: Path,
    ) -> None:
        """
        Args:
            largest, longest: samples with the largest token id and with the most tokens of all cases.
        """
        self._options = options
        self._replay = ReplayOptions(
            options.files, tiny=options.tiny, max_tokens=options.max_tokens, dtype=options.dtype, lr=0.0,
            repeat=options.repeat, seed=options.seed,
        )  # fmt: skip
        self._model = prepare_model(
            self._replay, [longest], vocabulary_for(int(largest.input_ids_N.max()), largest.where), scratch
        )
        self._sides: dict[str, Side] = {}
        for name in systems:
            if name != HALF:
                own = self._replay if name == UNSHARED else dataclasses.replace(self._replay, system=name)
                self._sides[name] = build_side(name, own, self._model, options.max_tokens)

    def run(self, samples: Sequence[ReplaySample], systems: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Old log-prob, reference and update of all samples as one mini-batch, systems in turn. By system."""
        longest = max(sample.num_tokens for sample in samples)
        if HALF in systems:
            self._sides[HALF] = self._half_side(samples)
        sides = [self._sides[name] for name in systems]
        for side in sides:  # veRL does not split samples
            is_longer = side.name == UNSHARED and longest > self._options.max_tokens
            side.max_tokens = longest if is_longer else self._options.max_tokens
        watch = Stopwatch(total=3 * len(sides) * self._options.repeat, repeats=self._options.repeat)
        runner = PhaseRunner(self._replay, samples, sides, watch, Ranks())
        with watch:
            runner.run()
        records = {name: self._record(name, runner, watch.begins[name]) for name in systems}
        reference = records[UNSHARED if UNSHARED in records else systems[0]]
        wanted = reference["gradients"]
        for values in records.values():
            values["gradient_error"] = worst_gradient(values["gradients"], wanted)[0]
            for kind in ("step", UPDATE):
                ratios = [a / b for a, b in zip(reference["seconds"][kind], values["seconds"][kind], strict=True)]
                values[f"{kind}_ratio"] = statistics.median(ratios)
                values[f"{kind}_ratio_spread"] = [min(ratios), max(ratios)]
        for values in records.values():
            del values["gradients"]
        return records

    def _half_side(self, samples: Sequence[ReplaySample]) -> Side:
        """psrl with a budget that depends on the samples, and with all tiers."""
        engine, max_tokens = self._sides["psrl"].actor.engine, self._options.max_tokens
        shape = model_shape(engine.tf_config, self._model.vocab_size)
        values = self._options.tiny.layers * cached_values(engine.tf_config, 1)
        budget = half_budget(samples, shape, KVFootprint.of_values(values, engine.param_dtype.itemsize), max_tokens)
        tiers = dataclasses.replace(self._replay, kv_cache_bytes=budget, kv_host_bytes=_HOST_BYTES)
        return build_side(HALF, tiers, self._model, max_tokens)

    def _record(self, name: str, runner: PhaseRunner, begins: list[list[Seconds]]) -> dict[str, Any]:
        tokens = sum(sample.num_tokens for sample in runner.samples)
        seconds = {phase: [self._clock(s) for s in runner.runs[phase][name].seconds] for phase in PHASES}
        seconds["step"] = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
        first = runner.runs[UPDATE][name].first
        gaps = [
            sorted(self._clock(b.minus(a)) for a, b in pairwise(times)) for times in begins
        ]  # the last one ends with the optimizer's step
        stats = [report.stats for report in first.reports]
        return {
            "seconds": seconds,
            "medians": {phase: statistics.median(values) for phase, values in seconds.items()},
            "tokens_per_second": tokens / statistics.median(seconds["step"]),
            "micro_batches": first.forwards,
            "tokens_computed": sum(s.unique_tokens for s in stats) if stats else tokens,
            "spine_tokens": sum(s.spine_tokens for s in stats) if stats else 0,
            "kv_bytes_predicted": max((s.kv_bytes_peak for s in stats), default=0),
            "kv_bytes_measured": max((report.kv_bytes_measured for report in first.reports), default=0),
            "kv_bytes_moved": sum(report.kv_bytes.to_host + report.kv_bytes.to_device for report in first.reports),
            "recomputed_tokens": sum(s.recomputed_tokens for s in stats),
            "attention_bytes": max((s.attention_bytes for s in stats), default=0),
            "micro_batch_seconds": gaps,
            "gradients": first.gradients,
        }

    def _clock(self, seconds: Seconds) -> float:
        return seconds.cpu if self._options.clock == "processor" else seconds.wall
