"""Results of parallel jobs against the run they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.batches import Row
from tests.helpers.forests import FORESTS, step_rows, tree_rows, wide_rows
from tests.helpers.parallel import Job, Layout, RankResult, reference, run_job
from tests.helpers.ranks import RankPool
from tests.helpers.truth import relative_errors

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SMALL = {"step": lambda: step_rows(1, 4), "tree": lambda: tree_rows(depth=2), "degenerate": FORESTS["degenerate"]}
ROWS = {**FORESTS, "wide": wide_rows, **{f"small {name}": rows for name, rows in SMALL.items()}}


def split(rows: Sequence[Row], num: int) -> list[Sequence[Row]]:
    """Equal shares, the last rows left out."""
    size = len(rows) // num
    return [rows[i * size : (i + 1) * size] for i in range(num)]


def check(
    pool: RankPool,
    layout: Layout,
    *,
    forest: str = "step",
    dtype: str = "float64",
    shares: Sequence[Sequence[Row]] | None = None,
    **job_fields: Any,
) -> tuple[list[RankResult], RankResult]:
    """Run a job on all ranks of ``pool`` and check it against one process without sharing; returns both results.

    Args:
        forest: names the rows, and with them the reference, which is computed once.
    """
    dp = pool.size // (layout.tp * layout.pp * layout.cp)
    job = Job(shares=shares or split(ROWS[forest](), dp), dtype=dtype, **job_fields)
    key = f"{forest} {len(job.rows)} {(job.checkpoint, dtype, job.model_type, job.loss, job.engine)}"
    want = reference(job, key)
    results = pool.run(run_job, job, layout)
    check_job(job, results, want, TOLERANCE[dtype])
    return results, want


def unshared(pool: RankPool, job: Job, layout: Layout) -> list[RankResult]:
    """The same rows on the same data-parallel ranks without sharing, each rank's in one micro-batch."""
    return pool.run(run_job, replace(job, sharing=False, budgets=(4096,)), layout)


def together(job: Job, results: Sequence[RankResult]) -> RankResult:
    """Results of all ranks as those of one process: rows in order, the mean loss, sums of what routers log."""
    (key,) = results[0].grads
    by_dp = {result.dp_rank: result for result in results if key in result.outputs}
    replicas = [by_dp[rank] for rank in range(len(job.shares))]
    outputs = {
        kind: [value for replica in replicas for value in replica.outputs[key][kind]]
        for kind in replicas[0].outputs[key]
    }
    logged = {name for result in results for name in result.router_losses[key]}
    return replace(
        results[0],
        outputs={key: outputs},
        losses={key: sum(replica.losses[key] for replica in replicas) / len(replicas)},
        router_losses={key: {name: _sum_logged(results, key, name) for name in logged}},
    )


def _sum_logged(results: Sequence[RankResult], key: int, name: str) -> torch.Tensor:
    """Over ranks; one without a layer of experts has logged nothing."""
    return torch.stack([r.router_losses[key][name] for r in results if name in r.router_losses[key]]).sum(0)


def check_router_losses(results: Sequence[RankResult], want: RankResult, key: int) -> None:
    """What routers log, added up over ranks; no layer's is zero."""
    (wanted,) = want.router_losses.values()
    assert wanted
    for name, values in wanted.items():
        got = _sum_logged(results, key, name)
        assert values.min() > 0 and got.tolist() == pytest.approx(values.tolist(), rel=1e-6), name


def check_job(job: Job, results: Sequence[RankResult], want: RankResult, tolerance: float) -> None:
    """Gradients, outputs, loss and weights of all ranks against the single process."""
    (wanted_outputs,) = want.outputs.values()
    (wanted_grads,) = want.grads.values()
    (wanted_loss,) = want.losses.values()
    keys = list(results[0].grads)
    assert keys, "no gradients came back"
    for key in keys:
        errors = relative_errors(results[0].grads[key], wanted_grads)
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= tolerance, (key, worst, errors[worst])
        _check_outputs(job, key, results, wanted_outputs, tolerance)
        by_dp = {r.dp_rank: r.losses[key] for r in results if key in r.losses}
        loss = sum(by_dp.values()) / len(by_dp)
        assert abs(loss - wanted_loss) <= tolerance * max(1.0, abs(wanted_loss)), (key, loss, wanted_loss)
    if job.adam:
        errors = relative_errors(results[0].weights, want.weights)
        assert max(errors.values()) <= tolerance, errors


def _check_outputs(job: Job, key: int, results: Sequence[RankResult], wanted: dict, tolerance: float) -> None:
    seen = set()
    for result in results:
        if key not in result.outputs:
            continue
        seen.add(result.dp_rank)
        start = sum(len(share) for share in job.shares[: result.dp_rank])
        for kind, values in result.outputs[key].items():
            for got, expected in zip(values, wanted[kind][start : start + len(values)], strict=True):
                assert torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance), (key, kind)
    assert seen == set(range(len(job.shares)))
