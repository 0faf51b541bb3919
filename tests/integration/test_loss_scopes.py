"""Every scope of a loss under every tier of the cache's budget, and what a loss finds outside the loss mask.

An update of a loss that couples samples has two plans, of its forward and of its passes: under a budget they may share
other prefixes, and so number other edges.
"""

import functools
import random

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import no_padding_2_padding

from psrl.config import PSRLConfig
from psrl.errors import LossError
from psrl.integrations.verl.engine.loss_scope import Targets, targets_of
from tests.helpers import Row, batch_tensordict, hf_truth, make_checkpoint, make_worker, ppo_loss_fn, value_loss_fn
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import step_rows, tree_rows, value_rows
from tests.integration.test_exactness import check_against_truth, check_equal

ROWS = tree_rows() + step_rows(1, 4)
LONGEST = max(len(row.input_ids) for row in ROWS)
LAYERS = 4
TIERS = {
    "waves": (0.8, 4, {}),
    "host": (0.25, 8, {"kv_host_bytes": 1 << 30, "kv_recompute": False}),
    "recompute": (0.3, LONGEST, {}),
}
"""Share of the cache's peak without a budget, ``max_tokens``, and further keys."""


def own_loss(model_output, data, dp_group=None):
    """Couples samples, and reads every token that is predicted, prompts and tool outputs included."""
    log_probs = [row[:-1] for row in model_output["log_probs"].unbind()]
    means = torch.stack([(row * torch.linspace(0.5, 1.5, len(row))).mean() for row in log_probs])
    return means.square().mean() + (means.max() - means.min()), {}


def tool_policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """Learns from tool outputs too: half a likelihood term on response tokens outside the mask."""
    padded = torch.zeros_like(response_mask)
    tools = (log_prob != 0) & ~response_mask.bool()
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss - 0.5 * torch.where(tools, log_prob, padded.to(log_prob.dtype)).mean(), {
        "actor/tools": tools.sum().item()
    }


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_policy_loss("tool_outputs")(tool_policy_loss)
    yield
    del POLICY_LOSS_REGISTRY["tool_outputs"]


LOSSES = {
    "vanilla": lambda: ppo_loss_fn(entropy_coeff=0.1),
    "gspo": lambda: ppo_loss_fn("gspo", "seq-mean-token-mean"),
    "geo_mean": lambda: ppo_loss_fn("geo_mean", entropy_coeff=0.1),
    "kl_cov": lambda: ppo_loss_fn("kl_cov"),
    "clip_cov": lambda: ppo_loss_fn(
        "clip_cov", policy={"clip_cov_ratio": 1.0, "clip_cov_lb": -1.0, "clip_cov_ub": 5.0}
    ),
    "padded_width": lambda: ppo_loss_fn("vanilla", "seq-mean-token-sum-norm"),
    "tool_outputs": lambda: ppo_loss_fn("tool_outputs"),
    "own": lambda: own_loss,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(scope="module")
def worker(checkpoint):
    """Workers by configuration, built once; none steps its optimizer."""

    @functools.cache
    def make(model_type="language_model", **psrl):
        return make_worker(checkpoint, model_type=model_type, psrl=PSRLConfig(attention_backend="sdpa", **psrl))

    return make


def tier_of(stats) -> str:
    if stats.kv_bytes_moved:
        return "host"
    return "recompute" if stats.recomputed_tokens else "waves" if stats.num_waves > 1 else "none"


@functools.cache
def unbudgeted(worker, loss, max_tokens, scope):
    return run_update(worker(loss_scope=scope), ROWS, LOSSES[loss](), max_tokens=max_tokens, calculate_entropy=True)


def update_under(worker, loss, tier, scope="auto"):
    share, max_tokens, psrl = TIERS[tier]
    whole = unbudgeted(worker, loss, max_tokens, scope)
    budget = int(whole.report.stats.kv_bytes_peak * share)
    budgeted = worker(kv_cache_bytes=budget, loss_scope=scope, **psrl)
    outcome = run_update(budgeted, ROWS, LOSSES[loss](), max_tokens=max_tokens, calculate_entropy=True)
    assert tier_of(outcome.report.stats) == tier and tier_of(whole.report.stats) == "none"
    assert outcome.report.kv_bytes.device_peak <= budget
    return outcome, whole


@pytest.mark.parametrize("loss", LOSSES)
def test_without_a_budget_equals_independent_samples(checkpoint, worker, loss):
    truth = hf_truth(checkpoint, ROWS, LOSSES[loss](), calculate_entropy=True, wide=True)
    for max_tokens in (4, LONGEST):
        check_against_truth(unbudgeted(worker, loss, max_tokens, "auto"), truth, ROWS, 2e-6)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_under_every_tier(worker, loss, tier):
    check_equal(*update_under(worker, loss, tier))


@pytest.mark.parametrize("tier", TIERS)
def test_the_mini_batch_scope_of_a_separable_loss_under_every_tier(worker, tier):
    outcome, _ = update_under(worker, "vanilla", tier, "mini_batch")
    check_equal(outcome, unbudgeted(worker, "vanilla", TIERS[tier][1], "auto"))


@pytest.mark.parametrize("tier", ["host", "recompute"])
def test_forward_only_under_every_tier(worker, tier):
    """A forward keeps its cache to the end: it has no waves."""
    share, max_tokens, psrl = TIERS[tier]
    batch = {"max_tokens": max_tokens, "calculate_entropy": True}
    whole = run_inference(worker(), ROWS, **batch)
    budget = int(whole.report.stats.kv_bytes_peak * share)
    outcome = run_inference(worker(kv_cache_bytes=budget, **psrl), ROWS, **batch)
    assert tier_of(outcome.report.stats) == tier and outcome.report.kv_bytes.device_peak <= budget
    for kind, rows in whole.model_output.items():
        for got, want in zip(outcome.model_output[kind], rows, strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tier", TIERS)
def test_critics_under_every_tier(worker, tier):
    rows, (share, max_tokens, psrl) = value_rows(), TIERS[tier]
    max_tokens = min(max_tokens, max(len(row.input_ids) for row in rows))
    whole = run_update(worker("value_model"), rows, value_loss_fn(), max_tokens=max_tokens)
    budget = int(whole.report.stats.kv_bytes_peak * share)
    outcome = run_update(
        worker("value_model", kv_cache_bytes=budget, **psrl), rows, value_loss_fn(), max_tokens=max_tokens
    )
    check_equal(outcome, whole)
    assert tier_of(outcome.report.stats) == tier


def grpo_rows():
    """Two prompts of 30 tokens, eight responses of 20 each, old log-probs off."""
    rnd, rows = random.Random(0), []
    for group in range(2):
        prompt = [rnd.randrange(4, 128) for _ in range(30)]
        for _ in range(8):
            response, advantage = [rnd.randrange(4, 128) for _ in range(20)], rnd.gauss(0, 1)
            old = [rnd.gauss(-6, 0.3) for _ in response]
            rows.append(Row(prompt + response, [0] * 30 + [1] * 20, [advantage] * 20, old, uid=str(group)))
    return rows


@pytest.mark.parametrize("kv_bytes", [60_000, 50_000, 40_000, 30_000, 20_000, 10_000])
def test_a_coupled_loss_under_budgets_that_share_other_prefixes(worker, kv_bytes):
    rows, loss_fn = grpo_rows(), ppo_loss_fn("geo_mean")
    whole = run_update(worker(), rows, loss_fn, max_tokens=64)
    check_equal(run_update(worker(kv_cache_bytes=kv_bytes), rows, loss_fn, max_tokens=64), whole)


# ----------------------------------------------------------------------------------------------- sums over samples
def on_policy_rows(worker, rows):
    """The rows with the model's own log-probs as the old ones."""
    old = run_inference(worker, rows, max_tokens=1000).model_output["log_probs"]
    return [Row(r.input_ids, r.loss_mask, r.advantages, o.tolist(), uid=r.uid) for r, o in zip(rows, old, strict=True)]


def test_a_coupled_loss_whose_values_cancel_is_noticed(worker):
    """On policy, with advantages of +1 and -1: both losses are 0, the gradient sample by sample is a multiple."""
    rnd, prompt = random.Random(1), [5, 6, 7, 8]
    rows = [
        Row(prompt + [rnd.randrange(4, 128) for _ in range(6)], [0] * 4 + [1] * 6, [1.0 - 2 * (i % 2)] * 6)
        for i in range(8)
    ]
    rows = on_policy_rows(worker(), rows)
    with pytest.raises(LossError, match=r"not a sum over samples.*psrl\.loss_scope=mini_batch"):
        run_update(worker(loss_scope="sample"), rows, ppo_loss_fn("geo_mean"), max_tokens=12)
    assert abs(run_update(worker(), rows, ppo_loss_fn("geo_mean"), max_tokens=12).loss) < 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_that_cancel_are_no_coupling(checkpoint, dtype):
    """``token-sum`` with normalised advantages: summands of 1e5 and a sum of about 0; a zero-variance group; a KL
    penalty at its minimum."""
    shared = make_worker(checkpoint, psrl=PSRLConfig(), dtype=dtype)
    plain = make_worker(checkpoint, dtype=dtype)
    rows = on_policy_rows(plain, grpo_rows())
    values = torch.randn(16, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (values - values.mean()) / values.std() * 1e4
    values[3] = values[7] = 0.0
    for row, advantages in zip(rows, values.tolist(), strict=True):
        row.advantages, row.extra = advantages, {"ref_log_prob": row.old_log_probs}
    loss_fn = ppo_loss_fn("vanilla", "token-sum", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl")
    batch = {"max_tokens": 64, "dtype": getattr(torch, dtype)}
    outcome, wanted = (run_update(each, rows, loss_fn, **batch) for each in (shared, plain))
    scale = float(values.abs().sum())
    assert abs(outcome.loss - wanted.loss) <= (1e-5 if dtype == "float32" else 1e-12) * scale


def test_a_kl_penalty_at_its_minimum_is_no_coupling(checkpoint):
    """Advantages of 0 and the reference equal to the policy: all derivatives are rounding errors."""
    shared = make_worker(checkpoint, psrl=PSRLConfig(), dtype="float32")
    rows = on_policy_rows(make_worker(checkpoint, dtype="float32"), ROWS)
    for row in rows:
        row.advantages, row.extra = [0.0] * len(row.old_log_probs), {"ref_log_prob": row.old_log_probs}
    loss_fn = ppo_loss_fn(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="low_var_kl")
    outcome = run_update(shared, rows, loss_fn, max_tokens=8, dtype=torch.float32)
    assert abs(outcome.loss) < 1e-6


def test_a_loss_that_couples_in_part_of_the_batch_is_noticed(worker):
    """Two samples are weighted by each other, by one part in ten thousand."""

    def loss(model_output, data, dp_group=None):
        rows = [row[-4:-1].sum() for row in model_output["log_probs"].unbind()]
        return sum(rows) + 1e-4 * (rows[0] * rows[1] if len(rows) > 1 else 0.0 * rows[0]), {}

    with pytest.raises(LossError, match="not a sum over samples"):
        run_update(worker(loss_scope="sample"), ROWS, loss, max_tokens=8)


# ------------------------------------------------------------------------------------------- outside the loss mask
def test_which_tokens_a_loss_may_read():
    assert targets_of(None) is targets_of(LOSSES["tool_outputs"]()) is Targets.RESPONSE
    assert targets_of(own_loss) is Targets.SAMPLE
    assert {targets_of(f) for f in (ppo_loss_fn(), ppo_loss_fn("clip_cov"), value_loss_fn(), sft_loss)} == {
        Targets.LOSS_MASK
    }


def test_a_policy_loss_of_the_users_under_a_name_of_verls(checkpoint, worker, monkeypatch):
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "gpg", tool_policy_loss)
    assert targets_of(ppo_loss_fn("gpg")) is Targets.RESPONSE
    truth = hf_truth(checkpoint, ROWS, ppo_loss_fn("gpg"), wide=True)
    check_against_truth(run_update(worker(), ROWS, ppo_loss_fn("gpg"), max_tokens=8), truth, ROWS, 2e-6)


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_forwards_give_verls_values_on_whole_responses(checkpoint, worker, model_type):
    """Tool outputs included; NaN on prompts, and where nothing is predicted."""
    plain, outputs = make_worker(checkpoint, model_type=model_type), []
    for each, max_tokens in ((worker(model_type), 8), (plain, 1000)):
        data = batch_tensordict(ROWS, max_tokens=max_tokens, calculate_entropy=model_type == "language_model")
        with each.engine.eval_mode():
            outputs.append(each.engine.infer_batch(data)["model_output"])
    ours, theirs = outputs
    assert set(ours) == ({"log_probs", "entropy"} if model_type == "language_model" else {"values"})
    assert sum(row.loss_mask[4:].count(0) for row in ROWS) > 20
    for kind, values in ours.items():
        padded = [no_padding_2_padding(each[kind], data) for each in (ours, theirs)]
        assert torch.allclose(*padded, rtol=1e-9, atol=1e-9)
        for got, row in zip(values.unbind(), ROWS, strict=True):
            start = row.loss_mask.index(1)
            assert got.isnan().tolist() == [True] * (start - 1) + [False] * (len(got) - start) + [True]


def test_what_a_loss_of_the_users_finds_outside_the_response(worker):
    """A policy loss gets responses; a loss function gets everything that is predicted."""
    seen = []

    def reading(model_output, data, dp_group=None):
        seen.append(model_output["log_probs"])
        return torch.stack([row[:-1].sum() for row in model_output["log_probs"].unbind()]).sum(), {}

    run_update(worker(), ROWS, reading, max_tokens=8)
    for got in seen[0].unbind():
        assert got.isnan().tolist() == [False] * (len(got) - 1) + [True]

    def careless(model_output, data, dp_group=None):
        return (model_output["log_probs"].values() * 0.0).sum(), {}

    with pytest.raises(LossError, match=r"nan: outputs that are not computed are NaN .*torch\.where"):
        run_update(worker(), ROWS, careless, max_tokens=8)


def test_a_validation_loss_finds_the_loss_mask(worker):
    """A forward with veRL's supervised loss computes what the loss reads."""
    data = batch_tensordict(ROWS, max_tokens=8)
    data["loss_mask"] = torch.nested.as_nested_tensor(
        [torch.tensor(row.loss_mask) for row in ROWS], layout=torch.jagged
    )
    tu.assign_non_tensor(data, calculate_entropy=False)
    engine = worker().engine
    with engine.eval_mode():
        output = engine.infer_batch(data, loss_function=functools.partial(sft_loss, None))
    for got, row in zip(output["model_output"]["log_probs"].unbind(), ROWS, strict=True):
        assert got.isnan().tolist() == [not wanted for wanted in row.loss_mask[1:]] + [True]
    assert float(output["loss"][0]) == pytest.approx(4.9, abs=1.0)


def test_metrics_are_those_of_one_evaluation_of_the_mini_batch(worker):
    outcome = run_update(worker(), ROWS, LOSSES["tool_outputs"](), max_tokens=8)
    (tools,) = outcome.metrics["actor/tools"].values
    assert tools == sum(row.loss_mask[row.loss_mask.index(1) :].count(0) for row in ROWS)
