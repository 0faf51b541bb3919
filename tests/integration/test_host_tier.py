"""A cache that exceeds the device's budget: layers of blocks go to the host and come back, and gradients stay.

Every budget is a share of the bytes that the plan takes without one.
"""

import dataclasses
import functools

import pytest
import torch

from psrl.cache import kv_cache, storage, tiered
from psrl.config import PSRLConfig
from psrl.errors import MemoryBudgetError, OutOfMemoryError
from psrl.integrations.megatron import core_attention
from psrl.integrations.megatron.host_tier import repeated_layers
from psrl.integrations.verl.engine.batch_plans import SampleTree
from psrl.integrations.verl.engine.facts import EngineFacts
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, step_rows, tree_rows

LAYERS = 8
SHARES = (1.0, 0.5, 0.25, 0.1)
HOST = 1 << 30
RECOMPUTE = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "groups": {
        "override_transformer_config": {
            "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4,
        }
    },
    "block": {
        "override_transformer_config": {
            "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3,
        }
    },
}  # fmt: skip
REPEATED = {
    "none": (),
    "selective": tuple((layer,) for layer in range(LAYERS)),
    "full": tuple((layer,) for layer in range(LAYERS)),
    "groups": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "block": ((0,), (1,), (2,)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(kind="qwen2"):
        kv_heads, experts = (4, 8) if kind == "deepseek_v3" else (2, 4)
        folder = tmp_path_factory.mktemp(kind)
        return make_checkpoint(folder, kind, layers=LAYERS, hidden=16, kv_heads=kv_heads, experts=experts)

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    """Workers by configuration, built once; the cache's budget is set anew by every test."""

    @functools.cache
    def make(kind="qwen2", recompute="none", dtype="float64"):
        routers = {"moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp64"} if kind == "deepseek_v3" else {}
        options = RECOMPUTE[recompute]
        transformer = {**routers, **options.get("override_transformer_config", {})}
        return make_worker(
            checkpoint(kind), psrl=PSRLConfig(), dtype=dtype,
            **{**options, "override_transformer_config": transformer},
        )  # fmt: skip

    return make


def budgeted(worker, kv_bytes: int | None, host_bytes: int | None = HOST):
    """The worker with other budgets, and the host as the last tier."""
    config = PSRLConfig(kv_cache_bytes=kv_bytes, kv_host_bytes=host_bytes, kv_recompute=False)
    object.__setattr__(worker.engine.engine_config, "psrl", config)
    return worker


def check_equal(outcome, whole, tolerance=1e-9):
    assert outcome.grads.keys() == whole.grads.keys()
    if whole.grads:
        assert max(relative_errors(outcome.grads, whole.grads).values()) <= tolerance
    assert outcome.loss == pytest.approx(whole.loss, rel=tolerance, abs=tolerance)
    for kind, rows in outcome.model_output.items():
        for got, want in zip(rows, whole.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def check_bytes(outcome, budget):
    report = outcome.report
    assert report.kv_bytes == report.kv_bytes_predicted
    assert report.kv_bytes.device_peak == report.stats.kv_bytes_peak <= budget
    return report.kv_bytes


def check_shares(worker, rows, max_tokens, shares=SHARES):
    whole = run_update(budgeted(worker, None), rows, ppo_loss_fn(), max_tokens=max_tokens, calculate_entropy=True)
    peak, moved = whole.report.stats.kv_bytes_peak, []
    for share in shares:
        budget = int(share * peak)
        outcome = run_update(
            budgeted(worker, budget), rows, ppo_loss_fn(), max_tokens=max_tokens, calculate_entropy=True
        )
        check_equal(outcome, whole)
        bytes_ = check_bytes(outcome, budget)
        moved.append(bytes_.to_host + bytes_.to_device)
    return moved


def test_gradients_at_every_budget(worker):
    moved = check_shares(worker(), tree_rows(depth=2) + step_rows(1, 4), 8)
    assert moved[0] == 0 and moved[-1] > moved[-2] > 0


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("recompute", ["full", *slow("selective", "groups", "block")])
def test_activation_recompute(worker, recompute):
    config = worker(recompute=recompute).engine.tf_config
    assert repeated_layers(config, LAYERS) == REPEATED[recompute]
    assert check_shares(worker(recompute=recompute), tree_rows(depth=2), 5, shares=(0.1,))[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "groups"])
@pytest.mark.parametrize("forest", FORESTS)
def test_gradients_at_every_budget_of_every_forest(worker, forest, recompute):
    for max_tokens in (1, 2) if forest == "degenerate" else (2, 7):  # few tokens: at 7 none is spine
        check_shares(worker(recompute=recompute), FORESTS[forest](), max_tokens, shares=(0.5, 0.25, 0.1))


def test_forward_only(worker):
    rows = tree_rows(depth=3)
    whole = run_inference(budgeted(worker(), None), rows, max_tokens=5)
    budget = int(0.2 * whole.report.stats.kv_bytes_peak)  # one layer of eight has to fit
    with pytest.raises(MemoryBudgetError, match=r"psrl\.kv_cache_bytes allows"):
        run_inference(budgeted(worker(), budget, None), rows, max_tokens=5)
    outcome = run_inference(budgeted(worker(), budget), rows, max_tokens=5)
    check_equal(outcome, whole)
    assert check_bytes(outcome, budget).to_host > 0


@pytest.mark.slow
def test_losses_that_couple_samples_have_two_plans(worker):
    rows, loss = tree_rows(depth=2), ppo_loss_fn("geo_mean")
    whole = run_update(budgeted(worker(), None), rows, loss, max_tokens=5)
    budget = int(0.1 * whole.report.stats.kv_bytes_peak)
    outcome = run_update(budgeted(worker(), budget), rows, loss, max_tokens=5)
    check_equal(outcome, whole)
    assert check_bytes(outcome, budget).to_host > outcome.report.stats.kv_bytes_to_host > 0


@pytest.mark.slow
def test_latents(worker):
    rows = tree_rows(depth=2)
    for recompute in ("none", "selective", "full"):
        latent = worker("deepseek_v3", recompute)
        assert repeated_layers(latent.engine.tf_config, LAYERS) == REPEATED["full" if recompute == "full" else "none"]
        whole = run_update(budgeted(latent, None), rows, ppo_loss_fn(), max_tokens=5)
        budget = int(0.1 * whole.report.stats.kv_bytes_peak)
        outcome = run_update(budgeted(latent, budget), rows, ppo_loss_fn(), max_tokens=5)
        assert check_bytes(outcome, budget).to_host > 0
        biases = [name for name in outcome.grads if name.endswith("correction_bias")]
        for name in biases:
            del outcome.grads[name], whole.grads[name]
        check_equal(outcome, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_equal_to_the_bit_to_the_same_plan_without_transfers(worker, monkeypatch, dtype):
    rows, plain = tree_rows(depth=2), worker(dtype=dtype)
    batch = {"max_tokens": 5, "dtype": torch.float32}
    budget = int(0.1 * run_update(budgeted(plain, None), rows, ppo_loss_fn(), **batch).report.stats.kv_bytes_peak)
    outcome = run_update(budgeted(plain, budget), rows, ppo_loss_fn(), **batch)
    assert check_bytes(outcome, budget).to_host > 0
    plan = SampleTree.plan
    monkeypatch.setattr(SampleTree, "plan", lambda *a, **k: dataclasses.replace(plan(*a, **k), tiers=None))
    check_equal(outcome, run_update(plain, rows, ppo_loss_fn(), **batch), 0.0)


def test_budgets_that_cannot_be_kept(worker):
    rows = tree_rows(depth=2)
    with pytest.raises(MemoryBudgetError, match=r"one layer of micro-batch .*psrl\.kv_cache_bytes allows 100"):
        run_update(budgeted(worker(), 100), rows, ppo_loss_fn(), max_tokens=5)
    whole = run_update(budgeted(worker(), None), rows, ppo_loss_fn(), max_tokens=5)
    budget = int(0.1 * whole.report.stats.kv_bytes_peak)
    with pytest.raises(MemoryBudgetError, match=r"host memory, but psrl\.kv_host_bytes allows 1,000"):
        run_update(budgeted(worker(), budget, 1000), rows, ppo_loss_fn(), max_tokens=5)


# ------------------------------------------------------------------------------------------------------ out of memory
PLACES = {
    "pass 1": (core_attention, "attend_layout", 5),
    "pass 2": (core_attention, "attend_layout", -25),
    "backward": (tiered.TieredKVCache, "own_grads", 9),
    "backward, no host": (kv_cache.KVCache, "own_grads", 9),
    "a block": (storage.DeviceTier, "empty", 60),
    "half a block, no host": (storage.DeviceTier, "empty", 6),
}
"""What fails, in which call; below 0: in which of those with gradients."""


@pytest.mark.parametrize("place", ["backward", *slow(*(place for place in PLACES if place != "backward"))])
def test_an_allocation_that_fails_in_the_middle(worker, monkeypatch, place):
    """Torch's own error, on its way through Megatron's schedule. The next step is as if nothing had been."""
    rows = tree_rows(depth=2)
    whole = run_update(budgeted(worker(), None), rows, ppo_loss_fn(), max_tokens=5)
    share = None if "no host" in place else 0.1
    budget = None if share is None else int(share * whole.report.stats.kv_bytes_peak)
    budgeted(worker(), budget)
    sessions, new_session = [], EngineFacts.new_session
    monkeypatch.setattr(EngineFacts, "new_session", lambda *args: sessions.append(new_session(*args)) or sessions[-1])
    owner, name, number = PLACES[place]
    run, calls = getattr(owner, name), 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += number > 0 or torch.is_grad_enabled()
        if calls == abs(number):
            torch.empty(1 << 60, dtype=torch.uint8)
        return run(*args, **kwargs)

    keeps = r"psrl\.keep_attention=false, " if budget is None else ""  # with transfers a plan keeps none
    keys = rf"Set {keeps}psrl\.kv_cache_bytes below [\d,]+, lower psrl\.max_tokens"
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises(OutOfMemoryError, match=keys):
            run_update(worker(), rows, ppo_loss_fn(), max_tokens=5)
    assert calls == abs(number)
    (cache,) = sessions[-1].caches
    assert (cache.num_live_blocks, cache.tier.live_bytes) == (0, 0) and cache.tier.peak_bytes > 0
    assert getattr(cache, "host_live_bytes", 0) == 0
    again = run_update(worker(), rows, ppo_loss_fn(), max_tokens=5)
    check_equal(again, whole)
    assert again.report.kv_bytes == again.report.kv_bytes_predicted
