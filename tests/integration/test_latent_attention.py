"""DeepSeek-V3: latents are shared, gradients are those of independent samples.

Bounds are 1e-9, also against transformers: here its norms, softmax and routers run in float64, as Megatron's do.
"""

import contextlib
import functools

import pytest
import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from verl.workers.config.engine import EngineRouterReplayConfig

from psrl.config import PSRLConfig
from psrl.errors import UnsupportedError
from psrl.integrations.megatron.latent_attention import PrefixLatentAttention
from psrl.integrations.megatron.layer_spec import share_prefixes_in_spec
from tests.helpers import Row, hf_truth, make_checkpoint, make_worker, ppo_loss_fn, relative_errors, value_loss_fn
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, step_rows, tree_rows
from tests.helpers.parallel import Job, Layout, reference, run_job
from tests.helpers.parallel_checks import check_job
from tests.helpers.ranks import RankPool
from tests.helpers.routes import routed_rows

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}
"""Blends frequencies and scales both rotary parts and scores."""
KINDS = {"plain": {}, "yarn": {"rope": YARN}, "one-projection-queries": {"query_rank": None}}
ROUTERS = {"moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp64"}
"""Biases stay as they are from update to update; routes do not depend on the micro-batch's rounding."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(kind="plain", layers=3):
        folder = tmp_path_factory.mktemp(kind)
        return make_checkpoint(folder, "deepseek_v3", layers=layers, kv_heads=4, experts=8, **KINDS[kind])

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(kind="plain", backend="sdpa", kv_bytes=None, **options):
        psrl = PSRLConfig(attention_backend=backend, kv_cache_bytes=kv_bytes)
        return make_worker(checkpoint(kind), psrl=psrl, override_transformer_config=ROUTERS, **options)

    return make


def gradients(outcome):
    """Without the routers' biases, which are exported among them."""
    return {name: grad for name, grad in outcome.grads.items() if not name.endswith("correction_bias")}


def check_equal(outcome, other, tolerance=1e-9):
    assert max(relative_errors(gradients(outcome), gradients(other)).values()) <= tolerance
    assert outcome.loss == pytest.approx(other.loss, rel=tolerance)


SMALL = {
    "small-step": lambda: step_rows(1, 3),
    "small-tree": lambda: tree_rows(depth=2),
    "odd": FORESTS["degenerate"],
}
"""Run under two budgets only."""
SLOW = [(kind, forest) for kind in ("plain", "yarn") for forest in FORESTS]


@pytest.mark.parametrize(
    ("kind", "forest"),
    [
        ("plain", "small-step"),
        ("yarn", "small-tree"),
        ("one-projection-queries", "odd"),
        *(pytest.param(kind, forest, marks=pytest.mark.slow) for kind, forest in SLOW),
    ],
)
def test_equals_independent_samples(checkpoint, worker, kind, forest):
    rows, loss_fn = {**FORESTS, **SMALL}[forest](), ppo_loss_fn(entropy_coeff=0.1)
    truth = hf_truth(checkpoint(kind), rows, loss_fn, calculate_entropy=True, wide=True)
    for budget in (2, 1000) if forest in SMALL else (1, 2, 3, 5, 1000):
        outcome = run_update(worker(kind), rows, loss_fn, max_tokens=budget, calculate_entropy=True)
        check_equal(outcome, truth)
        for values, wanted in (("log_probs", truth.log_probs), ("entropy", truth.entropies)):
            for got, want, row in zip(outcome.model_output[values], wanted, rows, strict=True):
                want = want[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]
                assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
        stats = outcome.report.stats
        assert outcome.report.kv_bytes_measured == stats.kv_bytes_peak
        assert (stats.spine_tokens > 0) == (budget < 1000)


def test_transformers_as_it_is_and_the_unshared_engine(checkpoint, worker):
    """Against transformers with its float32 inside, and veRL's own path, in float64."""
    rows, loss_fn = FORESTS["degenerate"](), ppo_loss_fn()
    outcome = run_update(worker(), rows, loss_fn, max_tokens=2)
    check_equal(outcome, hf_truth(checkpoint(), rows, loss_fn), 2e-6)
    unshared = make_worker(checkpoint(), override_transformer_config=ROUTERS)
    check_equal(outcome, run_update(unshared, rows, loss_fn, max_tokens=1000))


def test_a_token_costs_its_latent_and_not_its_heads(worker):
    """Of a token a layer caches a latent of 16 and a rotary part of 4; its 4 heads' K and V would be 96 numbers."""
    per_token = 3 * 20 * 8
    rows = [Row([*range(11, 21)], [0] + [1] * 9), Row([*range(11, 17), 21], [0] + [1] * 6)]
    update = run_update(worker(), rows, ppo_loss_fn(), max_tokens=4).report
    assert update.stats.spine_tokens == 6
    assert update.kv_bytes_measured == update.stats.kv_bytes_peak == 12 * per_token  # and gradients
    inference = run_inference(worker(), rows, max_tokens=4).report
    assert inference.kv_bytes_measured == inference.stats.kv_bytes_peak == 6 * per_token


@pytest.mark.parametrize("recompute", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_activation_recompute(worker, recompute):
    rows, loss_fn = FORESTS["degenerate"](), ppo_loss_fn()
    plain = run_update(worker(), rows, loss_fn, max_tokens=2)
    check_equal(run_update(worker(recompute=recompute), rows, loss_fn, max_tokens=2), plain)


@pytest.mark.slow
def test_waves_and_dense_attention(worker):
    rows, loss_fn = tree_rows(depth=4) + step_rows(), ppo_loss_fn()
    whole = run_update(worker(), rows, loss_fn, max_tokens=4)
    budget = int(whole.report.stats.kv_bytes_peak * 0.6)
    waved = run_update(worker(backend="reference", kv_bytes=budget), rows, loss_fn, max_tokens=4)
    check_equal(waved, whole)
    assert waved.report.stats.num_waves > 1
    assert waved.report.kv_bytes_measured == waved.report.stats.kv_bytes_peak <= budget


def test_latent_attention_of_another_kind_is_refused():
    class Absorbed(MLASelfAttention):
        pass

    for module, error in ((MLASelfAttention, None), (Absorbed, "latent attention .*Absorbed")):
        attention = ModuleSpec(module=module, submodules=MLASelfAttentionSubmodules())
        spec = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention))
        with pytest.raises(UnsupportedError, match=error) if error else contextlib.nullcontext():
            shared = share_prefixes_in_spec(spec)
            assert shared.submodules.self_attention.module is PrefixLatentAttention


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


LAYOUTS = {
    "tp-pp": (Layout(tp=2, pp=2), {}),
    "tp4": (Layout(tp=4), {"recompute": "full"}),
    "tp-ep": (Layout(tp=2, ep=2), {}),
    "vpp-ep": (Layout(pp=2, vpp=2, ep=2), {}),
    "tp-cp": (Layout(tp=2, cp=2), {"recompute": "full"}),
    "pp-cp-ep": (Layout(pp=2, cp=2, ep=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_parallel_layouts(pool, checkpoint, name):
    """Gradients, log-probs and the weights after two steps of Adam against one process without sharing."""
    layout, engine = LAYOUTS[name]
    rows, dp = FORESTS["degenerate"]() + tree_rows(depth=2)[:4], 4 // (layout.tp * layout.pp * layout.cp)
    size = len(rows) // dp
    job = Job(
        checkpoint(layers=4),
        [rows[i * size : (i + 1) * size] for i in range(dp)],
        budgets=(max(1, 4 // layout.cp), 1000),
        engine={"override_transformer_config": ROUTERS, **engine},
        kv_share=0.8 if dp == 1 else None,
    )
    want = reference(job, "latents")
    results = pool.run(run_job, job, layout)
    check_job(job, results, want, 1e-9)
    for result in results:
        for report in result.reports.values():
            assert report.kv_bytes_measured == report.stats.kv_bytes_peak
    assert any(result.reports[job.budgets[0]].kv_bytes_measured > 0 for result in results)


@pytest.mark.parametrize("forest", ["small-tree", *(pytest.param(name, marks=pytest.mark.slow) for name in FORESTS)])
def test_float32(checkpoint, worker, forest):
    """The precision of jobs, against transformers in float64."""
    rows, loss_fn = {**FORESTS, **SMALL}[forest](), ppo_loss_fn(entropy_coeff=0.1)
    truth = hf_truth(checkpoint("yarn"), rows, loss_fn, calculate_entropy=True, wide=True)
    for budget in (3, 1000):
        engine = worker("yarn", dtype="float32")
        outcome = run_update(engine, rows, loss_fn, max_tokens=budget, dtype=torch.float32, calculate_entropy=True)
        check_equal(outcome, truth, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp-pp", "pp-cp-ep"])
def test_parallel_layouts_in_float32(pool, checkpoint, name):
    layout, engine = LAYOUTS[name]
    rows = tree_rows(depth=2)[:4]
    job = Job(
        checkpoint(layers=4),
        [rows],
        budgets=(max(1, 4 // layout.cp), 1000),
        dtype="float32",
        lr=1e-4,
        engine={"override_transformer_config": ROUTERS, **engine},
    )
    check_job(job, pool.run(run_job, job, layout), reference(job, "latents in float32"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vpp-ep", "pp-cp-ep"])
def test_parallel_layouts_with_replayed_routes(pool, checkpoint, name):
    """Routes that part within samples; the first of four layers is dense, and in ``vpp-ep`` alone in its chunk."""
    layout, engine = LAYOUTS[name]
    dp = 4 // (layout.tp * layout.pp * layout.cp)
    rows = routed_rows(tree_rows(depth=2)[:4], layers=3, experts=8, topk=4, parts_at=3)
    size = len(rows) // dp
    job = Job(
        checkpoint(layers=4),
        [rows[i * size : (i + 1) * size] for i in range(dp)],
        budgets=(max(1, 4 // layout.cp), 1000),
        engine={
            "override_transformer_config": ROUTERS,
            "router_replay": EngineRouterReplayConfig(mode="R2"),
            **engine,
        },
        record=True,
    )
    want = reference(job, "latents with routes")
    results = pool.run(run_job, job, layout)
    check_job(job, results, want, 1e-9)
    recording = [result for result in results if result.routes]
    assert {result.dp_rank for result in recording} == set(range(dp))
    for result in recording:
        for got, wanted in zip(result.routes, want.routes[result.dp_rank * size :][:size], strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.slow
def test_critic(checkpoint):
    rows = tree_rows(depth=2)
    for index, row in enumerate(rows):
        num = sum(row.loss_mask)
        row.extra = {"values": [0.1 * index] * num, "returns": [0.3 - 0.2 * t for t in range(num)]}
    critic = make_worker(
        checkpoint(),
        model_type="value_model",
        psrl=PSRLConfig(attention_backend="sdpa"),
        loss_fn=value_loss_fn(),
        override_transformer_config=ROUTERS,
    )
    head = dict(critic.engine.get_per_tensor_param()[0])["lm_head.weight"]
    truth = hf_truth(checkpoint(), rows, value_loss_fn(), value_head=head, wide=True)
    for budget in (3, 1000):
        check_equal(run_update(critic, rows, value_loss_fn(), max_tokens=budget), truth)
