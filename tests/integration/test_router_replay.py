"""Router replay with shared prefixes against veRL's own engine, which replays every sample by itself."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from verl.workers.config.engine import EngineRouterReplayConfig

from psrl.config import PSRLConfig
from psrl.errors import InputError
from psrl.integrations.verl.engine.batch import samples_from_tensordict
from psrl.integrations.verl.engine.routes import replayed_routes, take_routes
from tests.helpers import batch_tensordict, make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_update
from tests.helpers.forests import FORESTS, degenerate_rows, step_rows, tree_rows
from tests.helpers.parallel import Job, Layout, reference, run_job
from tests.helpers.parallel_checks import check_job
from tests.helpers.routes import routed_rows, without_routes

LAYERS = 2
LOSS = ppo_loss_fn(entropy_coeff=0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(expert_bias=False):
        return make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", layers=LAYERS, expert_bias=expert_bias)

    return make


def worker(checkpoint, mode, *, sharing, **options):
    """A later engine with router replay takes veRL's own routers from an earlier one: use it before making another."""
    psrl = PSRLConfig(enable=sharing, attention_backend="sdpa")
    return make_worker(checkpoint(), psrl=psrl, router_replay=EngineRouterReplayConfig(mode=mode), **options)


def update(engine, rows, budget=1000, **batch):
    return run_update(engine, rows, LOSS, max_tokens=budget, calculate_entropy=True, **batch)


def check_equal(outcome, wanted):
    assert max(relative_errors(outcome.grads, wanted.grads).values()) <= 1e-9
    assert outcome.loss == pytest.approx(wanted.loss, rel=1e-9)
    for kind, values in outcome.model_output.items():
        for got, want in zip(values, wanted.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), kind


DEFAULT = (("R2", "step", None), ("R3", "tree", "full"))
"""Cases of the default suite; the others are slow."""
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
    for case in itertools.product(("R2", "R3"), FORESTS, (None, "full"))
]


@pytest.mark.parametrize(("mode", "forest", "recompute"), CASES)
def test_replay_equals_that_of_every_sample_by_itself(checkpoint, mode, forest, recompute):
    rows = FORESTS[forest]()
    agree, part = routed_rows(rows, layers=LAYERS), routed_rows(rows, layers=LAYERS, parts_at=2)
    alone = worker(checkpoint, mode, sharing=False, recompute=recompute)
    wanted_agree, wanted_part = update(alone, agree), update(alone, part)

    shared = worker(checkpoint, mode, sharing=True, recompute=recompute)
    native = update(shared, rows)
    assert max(relative_errors(native.grads, wanted_agree.grads).values()) > 0.1
    check_equal(update(shared, agree, enable_routing_replay=False), native)
    unique = native.report.stats.unique_tokens
    for budget in (3, 1000):
        outcome = update(shared, agree, budget)
        check_equal(outcome, wanted_agree)
        if mode == "R2" or forest != "degenerate":  # which has a row without a response, where R3 replays nothing
            assert outcome.report.stats.unique_tokens == unique
        outcome = update(shared, part, budget)
        check_equal(outcome, wanted_part)
        assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
        assert unique < outcome.report.stats.unique_tokens < outcome.report.stats.num_tokens


def test_recorded_routes_are_those_of_every_sample_by_itself(checkpoint):
    rows = tree_rows() + degenerate_rows()

    def record(engine, budget):
        return engine.infer_batch(batch_tensordict(rows, max_tokens=budget, enable_routing_replay=True))

    wanted = record(worker(checkpoint, "R2", sharing=False), 30)["routed_experts"].unbind()
    assert [x.shape for x in wanted] == [(len(row.input_ids), LAYERS, 2) for row in rows]
    engine = worker(checkpoint, "R2", sharing=True)
    for budget in (3, 1000):
        recorded = record(engine, budget)["routed_experts"]
        assert recorded.dtype == torch.int16 and recorded.device.type == "cpu"
        for got, want in zip(recorded.unbind(), wanted, strict=True):
            assert torch.equal(got, want)
    for row, experts in zip(rows, wanted, strict=True):
        row.routed_experts = experts
    replayed = update(engine, rows, 5)
    check_equal(replayed, update(engine, without_routes(rows), 5))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Sigmoid routers with biases that choose among groups; the first of three layers is dense."""
    folder = make_checkpoint(tmp_path_factory.mktemp("mla"), "deepseek_v3", layers=3, kv_heads=4, experts=8)
    return lambda: folder


ROUTERS = {"moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp64"}
"""Biases stay as they are from update to update; routes do not depend on the micro-batch's rounding."""


@pytest.mark.parametrize(("mode", "layers"), [("R2", 2), ("R3", 3)])
def test_latents_and_a_dense_layer(deepseek, mode, layers):
    """A rollout may also have routes of the dense layer, which mean nothing and may differ."""
    rows = tree_rows(depth=2)
    agree = routed_rows(rows, layers=layers, experts=8, topk=4)
    part = routed_rows(rows, layers=layers, experts=8, topk=4, parts_at=3)
    if layers == 3:
        for index, row in enumerate(agree):
            row.routed_experts[:, 0] = index % 8
    options = {"override_transformer_config": ROUTERS}
    alone = worker(deepseek, mode, sharing=False, **options)
    wanted_agree, wanted_part = update(alone, agree), update(alone, part)
    shared = worker(deepseek, mode, sharing=True, **options)
    native = update(shared, rows)
    assert max(relative_errors(native.grads, wanted_agree.grads).values()) > 0.1
    for budget in (3, 1000):
        outcome = update(shared, agree, budget)
        check_equal(outcome, wanted_agree)
        assert outcome.report.stats.unique_tokens == native.report.stats.unique_tokens
        outcome = update(shared, part, budget)
        check_equal(outcome, wanted_part)
        assert outcome.report.stats.unique_tokens > native.report.stats.unique_tokens


def test_routes_recorded_beside_a_dense_layer(deepseek):
    rows = tree_rows(depth=2)
    batch = batch_tensordict(rows, max_tokens=30, enable_routing_replay=True)
    options = {"override_transformer_config": ROUTERS}
    wanted = worker(deepseek, "R2", sharing=False, **options).infer_batch(batch)["routed_experts"].unbind()
    assert [x.shape for x in wanted] == [(len(row.input_ids), 2, 4) for row in rows]
    engine = worker(deepseek, "R2", sharing=True, **options)
    for got, want in zip(engine.infer_batch(batch)["routed_experts"].unbind(), wanted, strict=True):
        assert torch.equal(got, want)
    for row, experts in zip(rows, wanted, strict=True):
        row.routed_experts = experts
    check_equal(update(engine, rows, 5), update(engine, without_routes(rows), 5))


def test_rollouts_may_know_less_than_all_tokens(checkpoint):
    """No route of the last token; zeros, the same expert twice, behind the last generation."""
    rows = routed_rows(step_rows(num_groups=1), layers=LAYERS)
    for index, row in enumerate(rows):
        experts = row.routed_experts
        experts[-3:] = 0
        row.routed_experts = experts[:-1] if index % 2 else experts
    wanted = update(worker(checkpoint, "R3", sharing=False), rows)
    shared = worker(checkpoint, "R3", sharing=True)
    for budget in (3, 1000):
        check_equal(update(shared, rows, budget), wanted)


STATISTICS = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_losses_and_statistics_of_routers_that_replay(checkpoint, mode):
    """Biases count the replayed experts, balancing losses the routers' own; every token counts, the last ones too."""
    job = Job(
        checkpoint(expert_bias=True),
        [routed_rows(tree_rows(), layers=LAYERS, parts_at=6)],
        budgets=(5,),  # an update changes the biases
        engine={
            "override_transformer_config": STATISTICS,
            "router_replay": EngineRouterReplayConfig(mode=mode),
        },
        expert_bias=True,
    )
    want = reference(job, f"statistics {mode}")
    result = run_job(job, Layout())
    check_job(job, [result], want, 1e-9)
    (wanted_losses,) = want.router_losses.values()
    for kind, values in wanted_losses.items():
        assert result.router_losses[5][kind].tolist() == pytest.approx(values.tolist(), rel=1e-6), kind
    biases = [grad for name, grad in result.grads[5].items() if name.endswith("correction_bias")]
    assert len(biases) == LAYERS and all(bias.abs().max() > 0 for bias in biases)


CONFIG = SimpleNamespace(num_layers=LAYERS, moe_layer_freq=1, moe_router_topk=2, num_moe_experts=4)


def read(rows, mode="R2", forward_only=False, config=CONFIG, **batch):
    data, task = take_routes(batch_tensordict(rows, **batch), mode, forward_only=forward_only)
    return task, replayed_routes(task, data, samples_from_tensordict(data), config)


def test_what_a_batch_asks_for():
    """As veRL's engine decides it."""
    rows = step_rows(num_groups=1)
    routed, flag = routed_rows(rows, layers=LAYERS), {"enable_routing_replay": True}
    assert read(rows, forward_only=True, **flag)[0].is_recording
    assert not read(rows, forward_only=True)[0].is_recording
    for mode, batch, wanted in (("R2", {}, True), ("R3", {}, True), ("disabled", {}, False),
                                ("R2", {"enable_routing_replay": False}, False)):  # fmt: skip
        for forward_only in (True, False):
            task, routes = read(routed, mode, forward_only, **batch)
            assert (routes is not None) == wanted and not task.is_recording
    for mode, forward_only in (("R2", False), ("R3", False), ("R3", True)):
        with pytest.raises(InputError, match=f"router_replay.mode={mode}: the batch has no routed_experts"):
            read(rows, mode, forward_only, **flag)


def test_routes_that_are_not_the_models():
    rows = routed_rows(step_rows(num_groups=1), layers=LAYERS)
    with pytest.raises(InputError, match="has 2 layers of 2 experts a token, the model 3 of 2"):
        read(rows, config=SimpleNamespace(**{**vars(CONFIG), "num_layers": 3}))
    rows[1].routed_experts[4, 1, 0] = 4
    with pytest.raises(InputError, match="token 4 of sample 1 goes to an expert that is none of the model's 4"):
        read(rows)
    rows[1].routed_experts = rows[1].routed_experts[:-1]
    with pytest.raises(InputError, match=f"sample 1: routed_experts has {len(rows[1].input_ids) - 1} tokens"):
        read(rows)
