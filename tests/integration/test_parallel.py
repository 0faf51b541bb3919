"""Every parallel layout against one process without sharing: gradients, log-probs, weights after two steps of Adam."""

import os
import time

import pytest
import torch
from verl.workers.config.engine import EngineRouterReplayConfig

from tests.helpers import Row
from tests.helpers.forests import FORESTS, step_rows
from tests.helpers.parallel import Job, Layout, reference, run_job
from tests.helpers.parallel_checks import (
    ROWS,
    TOLERANCE,
    check,
    check_job,
    check_router_losses,
    split,
    together,
    unshared,
)
from tests.helpers.parallel_jobs import infer_and_train, save_and_resume
from tests.helpers.ranks import RankError
from tests.helpers.routes import routed_rows

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


DEFAULT = ("dp", "tp4", "pp-plain-overlap", "tp-cp", "tp-ep", "tp-pp-ep", "pp-ep-full", "dense", "experts")
"""Cases of the default suite, there with small forests; all are slow with the ones that they name."""


def cases(names):
    """Name, and what goes before the name of the forest."""
    small = [pytest.param(name, "small ", id=f"{name}-small") for name in names if name in DEFAULT]
    return small + [pytest.param(name, "", id=name, marks=pytest.mark.slow) for name in names]


def num_layers(layout, size):
    """Four are two of a stage, or one of a chunk; without stages two show as much."""
    return 2 if size and layout.pp == 1 else 4


@pytest.mark.parametrize(("name", "size"), cases(DENSE))
def test_dense(pool, checkpoint, name, size):
    layout, forest, engine = DENSE[name]
    kv_share = 0.8 if "waves" in name else None
    budgets = (max(1, 5 // layout.cp), 1000)  # of one rank
    folder = checkpoint(layers=num_layers(layout, size))
    results, _ = check(
        pool, layout, forest=size + forest, checkpoint=folder, engine=engine, kv_share=kv_share, budgets=budgets
    )
    assert any(result.reports[budgets[0]].kv_bytes_measured > 0 for result in results)
    for result in results:
        for report in result.reports.values():
            assert report.kv_bytes_measured == report.stats.kv_bytes_peak
        assert kv_share is None or result.reports[-1].stats.num_waves > 1


HOST = {
    "tp": (Layout(tp=2), "wide", {}),
    "tp-full": (Layout(tp=2), "wide", {"recompute": "full"}),
    "cp": (Layout(cp=2), "wide", {"recompute": "selective"}),
    "tp-cp": (Layout(tp=2, cp=2), "wide", {}),
    "tp-ep": (Layout(tp=2, ep=2), "wide", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOST)
def test_host_tier(pool, checkpoint, name):
    """Ranks with a budget that waves do not keep: their caches move to the host and back, all ranks alike."""
    layout, forest, engine = HOST[name]
    results, _ = check(
        pool, layout, forest=forest, checkpoint=checkpoint(*(["qwen3_moe"] if layout.ep > 1 else [])), engine=engine,
        kv_share=0.2, budgets=(max(1, 5 // layout.cp), 1000), psrl={"kv_host_bytes": 1 << 30},
    )  # fmt: skip
    for result in results:
        report = result.reports[-1]
        assert report.kv_bytes == report.kv_bytes_predicted and report.kv_bytes.to_host > 0


AGAIN = {
    "tp-cp": (Layout(tp=2, cp=2), "tree", {}),
    "vpp-full": (Layout(pp=2, vpp=2), "wide", {"recompute": "full"}),
    "tp-ep": (Layout(tp=2, ep=2), "wide", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_prefixes_computed_again(pool, checkpoint, name):
    """A budget below one root path, micro-batches of the longest sample: every rank shares less, all ranks alike."""
    layout, forest, engine = AGAIN[name]
    longest = max(len(row.input_ids) for row in ROWS[forest]())
    results, _ = check(
        pool, layout, forest=forest, checkpoint=checkpoint(*(["qwen3_moe"] if layout.ep > 1 else [])), engine=engine,
        kv_share=0.3, budgets=(-(-longest // layout.cp),),
    )  # fmt: skip
    for result in results:
        report = result.reports[-1]
        assert report.kv_bytes == report.kv_bytes_predicted
    assert any(result.reports[-1].stats.recomputed_tokens > 0 for result in results)


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


@pytest.mark.parametrize(("name", "size"), cases(MOE))
def test_experts(pool, checkpoint, name, size):
    layout, forest, engine = MOE[name]
    folder = checkpoint("qwen3_moe", layers=num_layers(layout, size))
    check(pool, layout, forest=size + forest, checkpoint=folder, engine=engine)


ROUTED = {
    "pp-ep-full": (Layout(pp=2, ep=2), "tree", {"recompute": "full"}),
    "tp-routes": (Layout(tp=2, ep=2, etp=1), "step", {}),
    "vpp-ep-waves": (Layout(pp=2, vpp=2, ep=2), "wide", {}),
    "cp-ep-waves": (Layout(cp=2, ep=2), "wide", {"recompute": "selective"}),
    "tp-cp-full": (Layout(tp=2, cp=2, ep=2), "degenerate", {"recompute": "full"}),
    "tp-pp-routes": (Layout(tp=2, pp=2, ep=2, etp=1), "step", {}),
}


@pytest.mark.parametrize(("name", "size"), cases(ROUTED))
def test_replayed_and_recorded_routes(pool, checkpoint, name, size):
    """Routes that part within samples; R2, so that the same engine records what its routers would do."""
    layout, forest, engine = ROUTED[name]
    dp = pool.size // (layout.tp * layout.pp * layout.cp)
    shares = split(routed_rows(ROWS[size + forest](), layers=4, parts_at=6), dp)
    results, want = check(
        pool,
        layout,
        forest=f"routed {size}{forest}",
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


EMPTY = {
    "dense": ("qwen3", Layout(), {}),
    "dense-plain-overlap": ("qwen3", Layout(), {**PLAIN, **OVERLAP}),
    "dense-vpp": ("qwen3", Layout(pp=2, vpp=2), {}),
    "experts": ("qwen3_moe", Layout(ep=2), {}),
    "experts-tp": ("qwen3_moe", Layout(tp=2, ep=2), {}),
    "experts-cp": ("qwen3_moe", Layout(cp=2, ep=2), {}),
}


@pytest.mark.parametrize(("name", "size"), cases(EMPTY))
def test_a_rank_without_rows_takes_part(pool, checkpoint, name, size):
    kind, layout, engine = EMPTY[name]
    shares = [[], step_rows(1, 4)[-2:], [], step_rows(1, 2, seed=3)][: 4 // (layout.tp * layout.pp * layout.cp)]
    # Upstream's loop over mini-batches goes by the rows of its rank, so no step of Adam here.
    folder = checkpoint(kind, layers=num_layers(layout, size))
    job = {"shares": shares, "checkpoint": folder, "engine": engine, "adam": False}
    _, want = check(pool, layout, forest="empty", **job)
    (wanted_outputs,) = want.outputs.values()
    (wanted_loss,) = want.losses.values()
    for dp_rank, called in pool.run(infer_and_train, Job(**job), layout):
        if called is None:  # a stage without outputs
            continue
        log_probs, loss, grad_norm = called
        start = sum(map(len, shares[:dp_rank]))
        assert len(log_probs) == len(shares[dp_rank])
        for got, expected in zip(log_probs, wanted_outputs["log_probs"][start:], strict=False):
            assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-9)
        assert loss == pytest.approx(wanted_loss, rel=1e-6) and grad_norm > 0


SAVED = {
    "ep-plain": (Layout(ep=2), PLAIN),
    "tp-ep": (Layout(tp=2, ep=2), {}),
    "pp-ep-etp": (Layout(tp=2, pp=2, ep=2, etp=1), PLAIN),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_has_the_experts_of_all_ranks(pool, checkpoint, tmp_path, name):
    """What is loaded is what was saved, the weights alone too; a step more is the step that came next."""
    layout, engine = SAVED[name]
    shares = split(ROWS["tree"](), pool.size // (layout.tp * layout.pp))
    job = Job(checkpoint("qwen3_moe"), shares, engine=engine)
    for rank in pool.run(save_and_resume, job, layout, str(tmp_path / "saved")):
        assert rank["moved"] > 1e-3
        assert (rank["weights"], rank["loaded"], rank["continued"]) == (0.0, 0.0, 0.0)


BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.3}
BIASED = {**BALANCED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYOUTS_OF_ONE_REPLICA = {
    "tp-pp-ep": Layout(tp=2, pp=2, ep=2, etp=1),
    "tp-pp": Layout(tp=2, pp=2),
    "tp-cp-ep": Layout(tp=2, cp=2, ep=2),
    "pp-cp-ep": Layout(pp=2, cp=2, ep=2),
}


@pytest.mark.parametrize(("name", "size"), cases(LAYOUTS_OF_ONE_REPLICA))
def test_losses_and_statistics_of_routers(pool, checkpoint, name, size):
    """Balancing loss, z-loss and expert biases are those of the samples in one micro-batch without sharing."""
    results, want = check(
        pool,
        LAYOUTS_OF_ONE_REPLICA[name],
        budgets=(5,),  # an update changes the biases, so one is compared
        forest=f"{size}tree",
        checkpoint=checkpoint("qwen3_moe", layers=2, expert_bias=True),
        engine={"override_transformer_config": BIASED},
        expert_bias=True,
    )
    check_router_losses(results, want, 5)
    biases = {name: grad for name, grad in results[0].grads[5].items() if name.endswith("correction_bias")}
    assert len(biases) == 2 and all(bias.abs().max() > 0 for bias in biases.values())


@pytest.mark.slow
def test_routers_count_prefixes_computed_again_as_often_as_their_samples(pool, checkpoint):
    """With losses and biases of routers an update has two plans, here of different unique tokens."""
    rows = ROWS["tree"]()
    longest = max(len(row.input_ids) for row in rows)
    results, want = check(
        pool,
        Layout(tp=2, pp=2, ep=2, etp=1),
        budgets=(longest,),
        forest="tree",
        checkpoint=checkpoint("qwen3_moe", layers=2, expert_bias=True),
        engine={"override_transformer_config": BIASED},
        expert_bias=True,
        psrl={"kv_cache_bytes": 1},
    )
    check_router_losses(results, want, longest)
    assert all(result.reports[longest].stats.recomputed_tokens > 0 for result in results)


LAYOUTS_OF_TWO_REPLICAS = {
    "dp-pp-ep": Layout(pp=2, ep=2),
    "dp-pp": Layout(pp=2),
    "dp-tp-ep": Layout(tp=2, ep=2),
    "dp-cp-ep": Layout(cp=2, ep=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS_OF_TWO_REPLICAS)
def test_losses_of_routers_with_data_parallel(pool, checkpoint, name):
    """Every replica balances the experts of its own samples, as without sharing; biases follow those of all."""
    job = Job(
        checkpoint("qwen3_moe", layers=2, expert_bias=True),
        split(ROWS["tree"](), 2),
        budgets=(5,),
        engine={"override_transformer_config": BIASED},
        expert_bias=True,
    )
    want = together(job, unshared(pool, job, Layout(pp=2, ep=2)))
    results = pool.run(run_job, job, LAYOUTS_OF_TWO_REPLICAS[name])
    check_job(job, results, want, TOLERANCE["float64"])
    check_router_losses(results, want, 5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, ep=2)], ids=["pp", "tp-ep"])
def test_losses_of_routers_beside_a_rank_without_rows(pool, checkpoint, layout):
    """Its loss is 0, so the mean over two replicas is half of the other's."""
    folder = checkpoint("qwen3_moe", layers=2, expert_bias=True)
    half = {**BIASED, "moe_aux_loss_coeff": 0.25, "moe_z_loss_coeff": 0.15}
    rows = ROWS["tree"]()
    jobs = [
        Job(folder, [[], rows], (5,), engine={"override_transformer_config": options}, expert_bias=True, adam=False)
        for options in (BIASED, half)
    ]
    want = reference(jobs[1], "beside an empty rank")
    results = pool.run(run_job, jobs[0], layout)
    check_job(jobs[0], results, want, TOLERANCE["float64"])
    check_router_losses(results, want, 5)


@pytest.mark.slow
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), Layout(pp=2, vpp=2), Layout(tp=2, cp=2)], ids=["tp-pp", "vpp", "tp-cp"]
)
def test_float32(pool, checkpoint, layout, forest):
    """A small step: Adam's first ones are as long for a gradient of mere rounding errors as for any other."""
    check(pool, layout, forest=forest, dtype="float32", checkpoint=checkpoint(), budgets=(3, 1000), lr=1e-4)


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
