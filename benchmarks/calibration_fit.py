"""From measured micro-batches and calls to the coefficients of the cost model.

Shape legend: C cycles, K coefficients.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.measured_ranks import Cycle
from psrl.cost import ATTENTION_BACKWARD, GEMM_BACKWARD
from psrl.model_sizes import ModelSizes
from psrl.simulate.calibration import CallOverhead, Direction
from psrl.simulate.sides import SHARED, UNSHARED
from psrl.simulate.work import Amounts
from psrl.types import FloatArray

_NAMES = tuple(f.name for f in fields(Direction))


@dataclass(frozen=True)
class Observed:
    """One phase of one case, medians over repeats. Seconds by the chosen clock."""

    side: str
    phase: str
    model: ModelSizes
    seconds: float
    optimizer: float
    """Part of ``seconds``."""
    optimizer_ranks: int
    """Data-parallel ranks that its states are sharded over."""
    num_samples: int
    num_tokens: int
    micro_batches: tuple[tuple[Amounts, bool], ...]
    """With whether a backward follows."""
    cycles: tuple[Cycle, ...]

    @property
    def with_entropy(self) -> bool:
        return self.phase == "old_log_prob"


def amounts_of_direction(model: ModelSizes, amounts: Amounts, *, backward: bool, with_entropy: bool) -> FloatArray:
    """[K] what each field of ``Direction`` is multiplied with, for a whole model on one rank."""
    gemm, attention = (GEMM_BACKWARD, ATTENTION_BACKWARD) if backward else (1.0, 1.0)
    shape = model.shape
    values = {
        "per_micro_batch": 1.0,
        "per_layer": model.num_layers,
        "per_tile": model.num_layers * amounts.tiles,
        "per_gemm_flop": gemm
        * (shape.flops_per_token * amounts.tokens + shape.flops_per_path_token * amounts.path_tokens),
        "per_attention_flop": attention * shape.flops_per_pair * amounts.pairs,
        "per_output_flop": gemm * shape.flops_per_row * amounts.rows,
        "per_cached_value": model.num_layers * model.cached_values(1) * amounts.path_tokens,
        "per_entropy_value": amounts.rows * model.vocab_size if with_entropy else 0.0,
    }
    return np.array([float(values[name]) for name in _NAMES])


def fit_cycles(observed: Sequence[Observed]) -> tuple[Direction, Direction, dict[str, float], float]:
    """Forward and backward coefficients, what each side adds to a micro-batch, and the median relative error."""
    rows, seconds = [], []
    for found in observed:
        for cycle in found.cycles:
            rows.append(_row(found, cycle.amounts, cycle.is_training))
            seconds.append(cycle.times.cpu)
    fitted = non_negative_least_squares(np.array(rows), np.array(seconds))
    predicted = np.array(rows) @ fitted
    error = float(np.median(np.abs(predicted / np.array(seconds) - 1)))
    size = len(_NAMES)
    forward = dict(zip(_NAMES, fitted[:size].tolist(), strict=True))
    backward = dict(zip(_NAMES, fitted[size : 2 * size].tolist(), strict=True))
    return Direction(**forward), Direction(**backward), {UNSHARED: 0.0, SHARED: float(fitted[-1])}, error


def _row(found: Observed, amounts: Amounts, is_training: bool) -> FloatArray:
    """[2 K + 1] forward, backward, what sharing adds to a micro-batch."""
    forward = amounts_of_direction(found.model, amounts, backward=False, with_entropy=found.with_entropy)
    backward = amounts_of_direction(found.model, amounts, backward=True, with_entropy=False)
    return np.concatenate([forward, backward * is_training, [float(found.side == SHARED)]])


def fit_calls(
    observed: Sequence[Observed], forward: Direction, backward: Direction, per_micro_batch: dict[str, float]
) -> dict[str, CallOverhead]:
    """What a call takes beyond its micro-batches and the optimizer, by side."""
    coefficients = np.concatenate(
        [[getattr(d, name) for name in _NAMES] for d in (forward, backward)] + [[per_micro_batch[SHARED]]]
    )
    calls = {}
    for side in (SHARED, UNSHARED):
        rows, rest = [], []
        for found in observed:
            if found.side == side:
                work = sum(float(_row(found, a, training) @ coefficients) for a, training in found.micro_batches)
                rows.append([1.0, found.num_samples, found.num_tokens])
                rest.append(max(found.seconds - found.optimizer - work, 1e-6))
        # Errors relative to the whole call: what is left over is small where micro-batches are many.
        weights = np.array([found.seconds for found in observed if found.side == side])
        fitted = non_negative_least_squares(np.array(rows), np.array(rest), weights)
        calls[side] = CallOverhead(*fitted.tolist(), per_micro_batch=per_micro_batch[side])
    return calls


def fit_optimizer(observed: Sequence[Observed]) -> float:
    """Seconds a parameter: median over updates."""
    return statistics.median(
        found.optimizer * found.optimizer_ranks / found.model.num_parameters for found in observed if found.optimizer
    )


def non_negative_least_squares(matrix: FloatArray, values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Minimise the relative errors ``(matrix @ x - values) / weights`` (default: ``values``) over x >= 0.

    Columns without any amount get 0.
    """
    divisor = values if weights is None else weights
    scaled = matrix / divisor[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    return _lawson_hanson(scaled / norms, values / divisor) / norms


def _lawson_hanson(matrix: FloatArray, values: FloatArray, tolerance: float = 1e-10) -> FloatArray:
    """Active-set algorithm (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23)."""
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(30 * matrix.shape[1]):
        gradient = np.where(free, -np.inf, matrix.T @ (values - matrix @ solution))
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            if trial[free].min() > 0:
                solution = trial
                break
            blocking = free & (trial <= 0)
            step = float((solution[blocking] / (solution[blocking] - trial[blocking])).min())
            solution = solution + step * (trial - solution)
            free &= solution > tolerance
            solution[~free] = 0.0
    return solution
