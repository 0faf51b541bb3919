#!/usr/bin/env python
"""Measure the simulator's cost model on this machine and write it as JSON for ``psrl simulate --calibration``.

    python benchmarks/calibrate.py OUT.json [--hidden 128] [--layers 2 4] [--clock processor]

Random models of two depths run old log-prob, reference and update on made-up samples that differ in length, sharing,
targets and micro-batch size, through the engines of both sides. Every micro-batch's seconds are then explained by its
amounts: non-negative least squares of relative errors, forward and backward together. What a call takes beyond its
micro-batches is explained by its samples and tokens. Two processes time point-to-point transfers and collectives.

``--clock processor`` (the default on a CPU) counts processor time, which other work on the machine disturbs least;
``elapsed`` (the default with a GPU) counts the time that passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script

from benchmarks.calibration_fit import Observed, fit_calls, fit_cycles, fit_optimizer  # noqa: E402
from benchmarks.measured_links import measure_link  # noqa: E402
from benchmarks.measured_ranks import Case, Job, Measurement, Times, measure  # noqa: E402
from psrl.data import ReplaySample  # noqa: E402
from psrl.model_sizes import ModelSizes  # noqa: E402
from psrl.simulate.calibration import Calibration, Link  # noqa: E402
from psrl.simulate.sides import SHARED, UNSHARED  # noqa: E402

VOCABULARY = 512


class Sizes(NamedTuple):
    """A random model: heads of 32 values, half as many K/V heads, an MLP of four times the hidden size."""

    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        return max(2, self.hidden // 32)

    @property
    def model(self) -> ModelSizes:
        return ModelSizes(
            f"random-{self.hidden}x{self.layers}", self.layers, self.hidden, self.heads, self.heads // 2,
            self.hidden // self.heads, 4 * self.hidden, VOCABULARY,
        )  # fmt: skip


class Recipe(NamedTuple):
    """Trajectories of ``steps`` samples each: sample t is the first ``first + t * more`` tokens of its trajectory, its
    last ``targets`` tokens are targets."""

    name: str
    trajectories: int
    steps: int
    first: int
    more: int
    targets: int
    max_tokens: int


RECIPES = (
    Recipe("short, unrelated", 8, 1, 96, 0, 48, 256),
    Recipe("long, unrelated", 2, 1, 800, 0, 400, 800),
    Recipe("all targets", 3, 1, 300, 0, 299, 300),
    Recipe("trajectories", 2, 4, 200, 60, 30, 450),
    Recipe("long trajectory", 1, 6, 300, 130, 40, 300),
    Recipe("tiny micro-batches", 2, 4, 60, 30, 10, 48),
)


def samples_of(recipe: Recipe, seed: int) -> list[ReplaySample]:
    """Made-up samples; trajectories share nothing."""
    rng = np.random.default_rng(seed)
    found = []
    for trajectory in range(recipe.trajectories):
        tokens = rng.integers(1, VOCABULARY, recipe.first + recipe.steps * recipe.more)
        for step in range(recipe.steps):
            ids = tokens[: recipe.first + step * recipe.more].copy()
            ids[0] = trajectory % VOCABULARY
            mask = np.arange(len(ids)) >= len(ids) - recipe.targets
            found.append(
                ReplaySample(
                    where=f"{recipe.name}:{trajectory}:{step}",
                    input_ids_N=ids.astype(np.int64),
                    loss_mask_N=mask,
                    position_ids_N=np.arange(len(ids), dtype=np.int64),
                    advantages_M=np.where(np.arange(recipe.targets) % 2, 1.0, -1.0),
                    old_log_probs_M=None,
                    uid=f"{trajectory}",
                    session=f"{trajectory}",
                    index=step,
                )
            )
    return found


def write_model(sizes: Sizes, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """A random checkpoint and a placeholder tokenizer; returns their folders."""
    from psrl.replay.model import make_placeholder_tokenizer, make_random_model
    from psrl.replay.options import TinyModel

    tiny = TinyModel(sizes.hidden, sizes.layers, sizes.heads, sizes.heads // 2)
    make_random_model("tiny-qwen2", tiny, VOCABULARY, seed, 65_535, folder / "model")
    make_placeholder_tokenizer(folder / "tokenizer")
    return folder / "model", folder / "tokenizer"


def recipe_cases(num_ranks: int = 1) -> tuple[list[ReplaySample], list[Case]]:
    """Samples and cases of every recipe on both sides; each of the data-parallel ranks runs all of them."""
    samples: list[ReplaySample] = []
    cases: list[Case] = []
    for seed, recipe in enumerate(RECIPES):
        made = samples_of(recipe, seed)
        rows = (tuple(range(len(samples), len(samples) + len(made))),) * num_ranks
        samples += made
        longest = max(sample.num_tokens for sample in made)
        cases.append(Case(recipe.name, SHARED, rows, 1, recipe.max_tokens))
        cases.append(Case(recipe.name, UNSHARED, rows, 1, max(recipe.max_tokens, longest)))
    return samples, cases


def observe(sizes: Sizes, repeats: int, clock: str, dtype: str = "float32") -> list[Observed]:
    """Run every recipe on both sides; medians over repeats."""
    samples, cases = recipe_cases()
    with tempfile.TemporaryDirectory(prefix="psrl_calibrate_") as folder:
        model, tokenizer = write_model(sizes, Path(folder))
        job = Job(str(model), str(tokenizer), tuple(samples), tuple(cases), repeats, dtype=dtype)
        [found] = measure(job)
    return observed_medians(found, cases, sizes.model, clock)


def observed_medians(
    found: Sequence[Measurement], cases: Sequence[Case], model: ModelSizes, clock: str, num_ranks: int = 1
) -> list[Observed]:
    """Medians over repeats of one rank's measurements, of the first ``len(cases)`` cases of its job."""
    keys = dict.fromkeys((m.case, m.phase) for m in found if m.case < len(cases))
    return [
        _median([m for m in found if (m.case, m.phase) == key], cases[key[0]].side, model, clock, num_ranks)
        for key in keys
    ]


def _median(repeats: Sequence[Measurement], side: str, model: ModelSizes, clock: str, num_ranks: int) -> Observed:
    """One phase of one case: every repeat ran the same micro-batches."""

    def seconds(times: Sequence[Times]) -> float:
        return statistics.median(t.cpu if clock == "processor" else t.wall for t in times)

    first = repeats[0]
    cycles = [
        dataclasses.replace(cycles[0], times=Times(*[seconds([c.times for c in cycles])] * 2))
        for cycles in zip(*(m.cycles for m in repeats), strict=True)
    ]
    return Observed(
        side=side,
        phase=first.phase,
        model=model,
        seconds=seconds([m.times for m in repeats]),
        optimizer=seconds([m.optimizer for m in repeats]),
        optimizer_ranks=num_ranks,
        num_samples=first.num_samples,
        num_tokens=first.num_tokens,
        micro_batches=tuple(first.micro_batches),
        cycles=tuple(cycles),
    )


def calibrate(sizes: Sequence[Sizes], *, repeats: int, clock: str, name: str, dtype: str = "float32") -> Calibration:
    """Measure everything. Takes a minute or two of processor time."""
    observed = [found for size in sizes for found in observe(size, repeats, clock, dtype)]
    return calibration_of(observed, sizes, clock=clock, name=name, dtype=dtype)


def calibration_of(
    observed: Sequence[Observed], sizes: Sequence[Sizes], *, clock: str, name: str, dtype: str = "float32"
) -> Calibration:
    """Fit what was observed, and measure the links."""
    forward, backward, per_micro_batch, error = fit_cycles(observed)
    calls = fit_calls(observed, forward, backward, per_micro_batch)
    link: Link = measure_link()
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores, one thread a process"
    models = ", ".join(f"hidden {size.hidden} x {size.layers} layers" for size in sizes)
    return Calibration(
        name=name,
        source="measured",
        note=f"{device}; {dtype}; {clock} time; torch {torch.__version__}; random models of {models}; median error of "
        f"a micro-batch {error:.1%}; links between two processes of this machine",
        dtype_bytes={"float32": 4, "float64": 8, "bfloat16": 2}[dtype],
        forward=forward,
        backward=backward,
        shared_call=calls[SHARED],
        unshared_call=calls[UNSHARED],
        per_optimizer_parameter=fit_optimizer(observed),
        node=link,
        network=link,
        processes_per_node=1 << 20,
        num_cores=None if on_gpu else os.cpu_count(),
        device_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
    )


def main() -> None:
    import torch

    default_clock = "elapsed" if torch.cuda.is_available() else "processor"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the random models")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="their two depths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--clock", choices=("processor", "elapsed"), default=default_clock)
    args = parser.parse_args()
    sizes = [Sizes(args.hidden, layers) for layers in args.layers]
    calibration = calibrate(sizes, repeats=args.repeats, clock=args.clock, name=args.out.stem, dtype=args.dtype)
    calibration.write(args.out)
    print(f"wrote {args.out}: {calibration.note}")


if __name__ == "__main__":
    main()
