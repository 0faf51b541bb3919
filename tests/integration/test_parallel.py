"""Every parallel layout against one process without sharing: gradients, log-probs, weights after two steps of Adam."""

import functools
import os
import time

import pytest
import torch
from verl.workers.config.engine import EngineRouterReplayConfig

from tests.helpers import Row, make_checkpoint, value_loss_fn
from tests.helpers.forests import FORESTS, step_rows, wide_rows
from tests.helpers.parallel import Job, Layout, check_job, reference, run_job
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.routes import routed_rows

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(kind="qwen3", tied=False, layers=4, **sizes):
        return make_checkpoint(tmp_path_factory.mktemp(kind), kind, tied, layers=layers, **sizes)

    return make


def split(rows, num):
    """Equal shares, the last rows left out."""
    size = len(rows) // num
    return [rows[i * size : (i + 1) * size] for i in range(num)]


ROWS = {**FORESTS, "wide": wide_rows}


def check(pool, layout, *, forest="step", dtype="float64", shares=None, **job):
    dp = pool.size // (layout.tp * layout.pp * layout.cp)
    job = Job(shares=shares or split(ROWS[forest](), dp), dtype=dtype, **job)
    want = reference(job, f"{forest} {len(job.rows)} {(job.checkpoint, dtype, job.model_type, job.loss, job.engine)}")
    results = pool.run(run_job, job, layout)
    check_job(job, results, want, TOLERANCE[dtype])
    return results, want


PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"override_ddp_config": {"overlap_grad_reduce": True}}
DENSE = {
    "dp": (Layout(), "degenerate", {}),
    "dp-plain": (Layout(), "step", PLAIN),
    "tp-overlap-waves": (Layout(tp=2), "wide", OVERLAP),
    "tp-plain-selective": (Layout(tp=2), "tree", {**PLAIN, "recompute": "selective"}),
    "tp4": (Layout(tp=4), "step", {}),
    "pp-plain-overlap": (Layout(pp=2), "step", {**PLAIN, **OVERLAP}),
    "tp-pp-full-waves": (Layout(tp=2, pp=2), "wide", {"recompute": "full"}),
    "vpp-waves": (Layout(pp=2, vpp=2), "wide", {}),
    "cp-dp-waves": (Layout(cp=2), "wide", {}),
    "cp-dp-plain-overlap": (Layout(cp=2), "degenerate", {**PLAIN, **OVERLAP}),
    "cp4-selective": (Layout(cp=4), "step", {"recompute": "selective"}),
    "tp-cp": (Layout(tp=2, cp=2), "tree", {}),
    "tp-cp-waves-full": (Layout(tp=2, cp=2), "wide", {"recompute": "full"}),
    "pp-cp": (Layout(pp=2, cp=2), "step", {}),
    "pp-cp-waves": (Layout(pp=2, cp=2), "wide", {}),
    "vpp-cp": (Layout(pp=2, vpp=2, cp=2), "tree", {}),
}


DEFAULT = ("dp", "tp4", "pp-plain-overlap", "tp-cp", "tp-ep", "tp-pp-ep", "pp-ep-full")
"""Cases of the default suite; the others are slow."""


def cases(names):
    return [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(DENSE))
def test_dense(pool, checkpoint, name):
    layout, forest, engine = DENSE[name]
    kv_share = 0.8 if "waves" in name else None
    budgets = (max(1, 5 // layout.cp), 1000)  # of one rank
    results, _ = check(
        pool, layout, forest=forest, checkpoint=checkpoint(), engine=engine, kv_share=kv_share, budgets=budgets
    )
    assert any(result.reports[budgets[0]].kv_bytes_measured > 0 for result in results)
    for result in results:
        for report in result.reports.values():
            assert report.kv_bytes_measured == report.stats.kv_bytes_peak
        assert kv_share is None or result.reports[-1].stats.num_waves > 1


@pytest.mark.slow
def test_per_token_loss(pool, checkpoint):
    """Gradients are summed over ranks and divided by token counts, whatever the micro-batches."""
    engine = {"override_transformer_config": {"calculate_per_token_loss": True}}
    for layout, forest in ((Layout(), "tree"), (Layout(pp=2, vpp=2), "degenerate"), (Layout(cp=2), "step")):
        dp = pool.size // (layout.pp * layout.cp)
        job = Job(checkpoint(), split(ROWS[forest](), dp), budgets=(4,), engine=engine)
        want = reference(Job(checkpoint(), job.shares), f"per-token {forest} {len(job.rows)}")
        check_job(job, pool.run(run_job, job, layout), want, TOLERANCE["float64"])


MOE = {
    "dp-ep": (Layout(ep=2), "degenerate", {}),
    "tp-ep": (Layout(tp=2, ep=2), "tree", {}),
    "pp-ep": (Layout(pp=2, ep=2), "step", {"recompute": "full"}),
    "vpp-ep": (Layout(pp=2, vpp=2, ep=2), "tree", {}),
    "cp-ep": (Layout(cp=2, ep=2), "step", {}),
    "tp-cp-ep": (Layout(tp=2, cp=2, ep=2), "degenerate", {"recompute": "full"}),
}


@pytest.mark.parametrize("name", cases(MOE))
def test_experts(pool, checkpoint, name):
    layout, forest, engine = MOE[name]
    check(pool, layout, forest=forest, checkpoint=checkpoint("qwen3_moe"), engine=engine)


ROUTED = {
    "pp-ep-full": (Layout(pp=2, ep=2), "tree", {"recompute": "full"}),
    "tp-routes": (Layout(tp=2, ep=2, etp=1), "step", {}),
    "vpp-ep-waves": (Layout(pp=2, vpp=2, ep=2), "wide", {}),
    "cp-ep-waves": (Layout(cp=2, ep=2), "wide", {"recompute": "selective"}),
    "tp-cp-full": (Layout(tp=2, cp=2, ep=2), "degenerate", {"recompute": "full"}),
    "tp-pp-routes": (Layout(tp=2, pp=2, ep=2, etp=1), "step", {}),
}


@pytest.mark.parametrize("name", cases(ROUTED))
def test_replayed_and_recorded_routes(pool, checkpoint, name):
    """Routes that part within samples; R2, so that the same engine records what its routers would do."""
    layout, forest, engine = ROUTED[name]
    dp = pool.size // (layout.tp * layout.pp * layout.cp)
    shares = split(routed_rows(ROWS[forest](), layers=4, parts_at=6), dp)
    results, want = check(
        pool,
        layout,
        forest=f"routed {forest}",
        shares=shares,
        checkpoint=checkpoint("qwen3_moe"),
        engine={**engine, "router_replay": EngineRouterReplayConfig(mode="R2")},
        record=True,
        kv_share=0.8 if "waves" in name else None,
    )
    recording = [result for result in results if result.routes]
    assert {result.dp_rank for result in recording} == set(range(dp))
    size = len(want.routes) // dp
    for result in recording:
        for got, wanted in zip(result.routes, want.routes[result.dp_rank * size :][:size], strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.slow
def test_a_rank_of_padding_takes_part(pool, checkpoint):
    """One rank's rows have no targets, others need many micro-batches."""
    padding = [Row([5, 6, 7], [0, 0, 0], uid="p"), Row([5, 6], [0, 0], uid="p")]
    long, short = step_rows(1, 4)[-2:], step_rows(1, 2, seed=3)
    check(
        pool, Layout(ep=2), forest="padding", shares=[padding, long, short, padding], checkpoint=checkpoint("qwen3_moe")
    )


BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.3}
BIASED = {**BALANCED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYOUTS_OF_ONE_REPLICA = {
    "tp-pp-ep": Layout(tp=2, pp=2, ep=2, etp=1),
    "tp-pp": Layout(tp=2, pp=2),
    "tp-cp-ep": Layout(tp=2, cp=2, ep=2),
    "pp-cp-ep": Layout(pp=2, cp=2, ep=2),
}


@pytest.mark.parametrize("name", cases(LAYOUTS_OF_ONE_REPLICA))
def test_losses_and_statistics_of_routers(pool, checkpoint, name):
    """Balancing loss, z-loss and expert biases are those of the samples in one micro-batch without sharing."""
    results, want = check(
        pool,
        LAYOUTS_OF_ONE_REPLICA[name],
        budgets=(5,),  # an update changes the biases, so one is compared
        forest="tree",
        checkpoint=checkpoint("qwen3_moe", layers=2, expert_bias=True),
        engine={"override_transformer_config": BIASED},
        expert_bias=True,
    )
    (wanted,) = want.router_losses.values()
    for kind, values in wanted.items():
        got = sum(result.router_losses[5][kind] for result in results)
        assert values.min() > 0 and got.tolist() == pytest.approx(values.tolist(), rel=1e-6), kind
    biases = {name: grad for name, grad in results[0].grads[5].items() if name.endswith("correction_bias")}
    assert len(biases) == 2 and all(bias.abs().max() > 0 for bias in biases.values())


@pytest.mark.slow
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), Layout(pp=2, vpp=2), Layout(tp=2, cp=2)], ids=["tp-pp", "vpp", "tp-cp"]
)
def test_float32(pool, checkpoint, layout, forest):
    """A small step: Adam's first ones are as long for a gradient of mere rounding errors as for any other."""
    check(pool, layout, forest=forest, dtype="float32", checkpoint=checkpoint(), budgets=(3, 1000), lr=1e-4)


UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"override_transformer_config": UNEVEN}])
def test_tied_embeddings_and_uneven_stages(pool, checkpoint, engine):
    check(pool, Layout(tp=2, pp=2), forest="tree", checkpoint=checkpoint("qwen2", tied=True), engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, cp=2)], ids=["tp", "tp-cp"])
def test_critic(pool, checkpoint, layout):
    """The value head sees all rows of its context-parallel rank, under sequence parallelism too."""
    rows = FORESTS["tree"]()
    for index, row in enumerate(rows):
        num = sum(row.loss_mask)
        row.extra = {"values": [0.1 * index] * num, "returns": [0.3 - 0.2 * t for t in range(num)]}
    check(
        pool,
        layout,
        forest="critic",
        shares=split(rows, 2 // layout.cp),
        checkpoint=checkpoint(),
        model_type="value_model",
        loss=(value_loss_fn, {}),
    )


@pytest.mark.slow
def test_a_rank_that_dies_is_named(pool):
    with pytest.raises(RankError, match=r"rank 2: died with exit code 7"):
        pool.run(_die_on, 2, seconds=30.0)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended(pool):
    with pytest.raises(RankError, match=r"rank 1: still running"):
        pool.run(_hang_on, 1, seconds=3.0)


def _die_on(rank):
    if torch.distributed.get_rank() == rank:
        os._exit(7)


def _hang_on(rank):
    if torch.distributed.get_rank() == rank:
        time.sleep(600)
