"""Prefix sharing against independent samples: transformers, eager attention, every row alone.

Float64 differs from transformers by its float32 rotary table and norms (2e-6); plans differ from each other by
rounding only (1e-9).
"""

import functools

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.errors import LossError, MemoryBudgetError
from tests.helpers import (
    Row,
    hf_truth,
    make_checkpoint,
    make_worker,
    ppo_loss_fn,
    relative_errors,
    value_loss_fn,
)
from tests.helpers.engines import at_targets, run_inference, run_update
from tests.helpers.forests import FORESTS, step_rows, tree_rows

BUDGETS = (1, 2, 3, 5, 1000)
SEPARABLE = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo")
COUPLED = ("geo_mean", "kl_cov", "clip_cov")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(kind="qwen2", tied=False):
        # Llama, Mistral: a head size and a rotary base that are not what the bridge would assume without being told.
        unusual = {"head_dim": 16, "rope_theta": 500.0} if kind in ("llama", "mistral") else {}
        return make_checkpoint(tmp_path_factory.mktemp(kind), kind, tied, **unusual)

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    """Workers by configuration, built once. None of the tests that use it steps the optimizer."""

    @functools.cache
    def make(kind="qwen2", tied=False, backend="sdpa", recompute=None, dtype="float64", kv_bytes=None, **psrl):
        config = PSRLConfig(attention_backend=backend, kv_cache_bytes=kv_bytes, **psrl)
        return make_worker(checkpoint(kind, tied), psrl=config, dtype=dtype, recompute=recompute)

    return make


def check_against_truth(outcome, truth, rows, tolerance):
    assert max(relative_errors(outcome.grads, truth.grads).values()) <= tolerance
    assert outcome.loss == pytest.approx(truth.loss, rel=tolerance, abs=tolerance)
    for kind, wanted in (("log_probs", truth.log_probs), ("entropy", truth.entropies), ("values", truth.values)):
        if kind not in outcome.model_output:
            continue
        for got, want, row in zip(outcome.model_output[kind], wanted, rows, strict=True):
            want = want[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]
            assert torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance)
    for key, want in truth.metrics.items():
        assert scalar(outcome.metrics[key]) == pytest.approx(scalar(want), rel=tolerance, abs=tolerance), key


def scalar(metric):
    """A metric that veRL reports as a Metric, a list of one, or a number."""
    if hasattr(metric, "aggregate"):
        return metric.aggregate()
    if isinstance(metric, list):
        (metric,) = metric
    return metric


def check_equal(outcome, other, tolerance=1e-9):
    assert max(relative_errors(outcome.grads, other.grads).values()) <= tolerance
    assert outcome.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)
    for kind, rows in outcome.model_output.items():
        for got, want in zip(rows, other.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def slow_but(default, cases):
    """All cases; those that are not in ``default`` are slow."""
    return [pytest.param(*case, marks=[] if case in default else pytest.mark.slow) for case in cases]


MODELS = (("qwen2", False), ("qwen2", True), ("qwen3", False), ("llama", False), ("llama", True))
EVERY_MODEL_AND_FOREST = (
    *(("qwen2", False, forest) for forest in FORESTS),
    ("qwen2", True, "tree"), ("qwen3", False, "step"), ("llama", False, "tree"), ("llama", True, "degenerate"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tied", "forest"),
    slow_but(EVERY_MODEL_AND_FOREST, [(*model, forest) for model in MODELS for forest in FORESTS]),
)
def test_equals_independent_samples_at_every_budget(checkpoint, worker, forest, kind, tied):
    rows, loss_fn = FORESTS[forest](), ppo_loss_fn(entropy_coeff=0.1)
    truth = hf_truth(checkpoint(kind, tied), rows, loss_fn, calculate_entropy=True)
    outcomes = [run_update(worker(kind, tied), rows, loss_fn, max_tokens=b, calculate_entropy=True) for b in BUDGETS]
    for outcome in outcomes:
        check_against_truth(outcome, truth, rows, 2e-6)
        check_equal(outcome, outcomes[-1])
        assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    assert outcomes[-1].report.stats.spine_tokens == 0 < outcomes[0].report.stats.spine_tokens


def test_mistral_equals_independent_samples(checkpoint, worker):
    """Llama's layers under another name, so one forest will do."""
    rows, loss_fn = tree_rows(depth=2), ppo_loss_fn(entropy_coeff=0.1)
    truth = hf_truth(checkpoint("mistral"), rows, loss_fn, calculate_entropy=True)
    for budget in (2, 1000):
        outcome = run_update(worker("mistral"), rows, loss_fn, max_tokens=budget, calculate_entropy=True)
        check_against_truth(outcome, truth, rows, 2e-6)


@pytest.mark.parametrize("budget", BUDGETS)
def test_forward_only_equals_the_update(worker, budget):
    rows = tree_rows() + step_rows()
    update = run_update(worker(), rows, ppo_loss_fn(), max_tokens=1000, calculate_entropy=True)
    inference = run_inference(worker(), rows, max_tokens=budget, calculate_entropy=True)
    for kind in ("log_probs", "entropy"):
        for got, want in zip(inference.model_output[kind], update.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
    assert inference.report.kv_bytes_measured == inference.report.stats.kv_bytes_peak


# sapo and geo_mean aggregate in their own way; of the coupled losses one mode each is enough but for clip_cov.
ONE_AGG_MODE = ("sapo", "geo_mean", "kl_cov")
LOSSES = [
    (loss_mode, agg_mode)
    for loss_mode in SEPARABLE + COUPLED
    for agg_mode in (AGG_MODES[:1] if loss_mode in ONE_AGG_MODE else AGG_MODES)
]


EVERY_LOSS_AND_AGG_MODE = {
    ("vanilla", AGG_MODES[0]), *((mode, AGG_MODES[0]) for mode in ONE_AGG_MODE),
    *((mode, AGG_MODES[1 + (index + shift) % 4]) for index, mode in enumerate(SEPARABLE + COUPLED) for shift in (0, 2)),
}  # fmt: skip
"""Two aggregations for every loss that takes one."""


@pytest.mark.parametrize(("loss_mode", "agg_mode"), slow_but(EVERY_LOSS_AND_AGG_MODE, LOSSES))
def test_every_policy_loss(checkpoint, worker, loss_mode, agg_mode):
    extra = {"loss_scale_factor": 7} if agg_mode == "seq-mean-token-sum-norm" else {}
    policy = {  # clip_cov takes all candidates: no random choice
        "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": -1.0, "clip_cov_ub": 5.0},
        "dro": {"dro_beta": 0.5},
    }.get(loss_mode)
    rows = tree_rows(depth=2) + step_rows(num_groups=1, num_steps=3)
    loss_fn = ppo_loss_fn(loss_mode, agg_mode, policy=policy, **extra)
    truth = hf_truth(checkpoint(), rows, loss_fn)
    check_against_truth(run_update(worker(), rows, loss_fn, max_tokens=6), truth, rows, 2e-6)


def test_norm_by_padded_width_takes_the_mini_batch_scope(checkpoint, worker):
    rows, loss_fn = tree_rows(depth=2), ppo_loss_fn("vanilla", "seq-mean-token-sum-norm")
    truth = hf_truth(checkpoint(), rows, loss_fn)
    check_against_truth(run_update(worker(), rows, loss_fn, max_tokens=4), truth, rows, 2e-6)


@pytest.mark.parametrize("kl_loss_type", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_against_a_reference(checkpoint, worker, kl_loss_type):
    rows = step_rows()
    for row in rows:
        row.extra["ref_log_prob"] = [x + 0.1 for x in row.old_log_probs]
    loss_fn = ppo_loss_fn(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kl_loss_type)
    truth = hf_truth(checkpoint(), rows, loss_fn)
    check_against_truth(run_update(worker(), rows, loss_fn, max_tokens=8), truth, rows, 2e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 5, 1000])
def test_activation_recompute(worker, recompute, budget):
    rows, loss_fn = tree_rows() + step_rows(), ppo_loss_fn()
    plain = run_update(worker(), rows, loss_fn, max_tokens=budget)
    check_equal(run_update(worker(recompute=recompute), rows, loss_fn, max_tokens=budget), plain)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_kept_attention_changes_no_bit(worker, recompute):
    """Where the budget has room for the cache, but not for all of attention's results, pass 2 computes others again."""
    rows, loss_fn, batch = tree_rows() + step_rows(), ppo_loss_fn(entropy_coeff=0.1), {"calculate_entropy": True}
    kept = run_update(worker(recompute=recompute), rows, loss_fn, max_tokens=5, **batch)
    tight, stats = kept.report.stats.kv_bytes_peak, kept.report.stats
    again = run_update(worker(recompute=recompute, kv_bytes=tight), rows, loss_fn, max_tokens=5, **batch)
    some = tight + stats.attention_bytes // 2
    half = run_update(worker(recompute=recompute, kv_bytes=some), rows, loss_fn, max_tokens=5, **batch)
    off = run_update(worker(recompute=recompute, keep_attention=False), rows, loss_fn, max_tokens=5, **batch)
    assert kept.report.attention_bytes == stats.attention_bytes > 0
    assert stats.flops_shared < again.report.stats.flops_shared == off.report.stats.flops_shared
    assert stats.attention_bytes > half.report.attention_bytes == half.report.stats.attention_bytes > 0
    assert stats.flops_shared < half.report.stats.flops_shared < off.report.stats.flops_shared
    for other in (again, half, off):
        assert other is half or other.report.attention_bytes == other.report.stats.attention_bytes == 0
        assert all(torch.equal(grad, other.grads[name]) for name, grad in kept.grads.items())


@pytest.mark.parametrize("budget", [3, 1000])
def test_reference_and_sdpa_attention_agree(worker, budget):
    rows, loss_fn = tree_rows() + step_rows(), ppo_loss_fn()
    dense = run_update(worker(backend="reference"), rows, loss_fn, max_tokens=budget)
    check_equal(run_update(worker(backend="sdpa"), rows, loss_fn, max_tokens=budget), dense)


def test_temperatures_of_their_own(checkpoint, worker):
    """Equal tokens at different temperatures share hidden states but not logits."""
    rows = [Row([5, 6, 7, 8], [0, 1, 1, 1]), Row([5, 6, 7, 8], [0, 1, 1, 1]), Row([5, 6, 7, 9], [0, 0, 1, 1])]
    temperature, loss_fn = [1.0, 0.5, 0.5], ppo_loss_fn(entropy_coeff=0.2)
    batch = {"temperature": temperature, "calculate_entropy": True}
    truth = hf_truth(checkpoint(), rows, loss_fn, **batch)
    for budget in (1, 2, 1000):
        outcome = run_update(worker(), rows, loss_fn, max_tokens=budget, **batch)
        check_against_truth(outcome, truth, rows, 2e-6)
        assert outcome.report.stats.unique_tokens == 5


def test_positions_of_their_own(checkpoint, worker):
    """Equal tokens at different positions are not shared; gaps in positions are respected."""
    rows = [
        Row([5, 6, 7, 8], [0, 1, 1, 1], position_ids=[0, 1, 2, 3]),
        Row([5, 6, 7, 8], [0, 1, 1, 1], position_ids=[0, 1, 9, 10]),
        Row([5, 6, 7, 8], [0, 1, 1, 1], position_ids=[40, 41, 42, 43]),
    ]
    truth = hf_truth(checkpoint(), rows, ppo_loss_fn())
    for budget in (1, 3, 1000):
        outcome = run_update(worker(), rows, ppo_loss_fn(), max_tokens=budget)
        check_against_truth(outcome, truth, rows, 2e-6)
        assert outcome.report.stats.unique_tokens == 10


@pytest.mark.parametrize("forest", FORESTS)
def test_critic(checkpoint, forest):
    rows = FORESTS[forest]()
    for index, row in enumerate(rows):
        num = sum(row.loss_mask)
        row.extra = {"values": [0.1 * index] * num, "returns": [0.3 - 0.2 * t for t in range(num)]}
    critic = make_worker(
        checkpoint(), model_type="value_model", psrl=PSRLConfig(attention_backend="sdpa"), loss_fn=value_loss_fn()
    )
    head = dict(critic.engine.get_per_tensor_param()[0])["lm_head.weight"]
    truth = hf_truth(checkpoint(), rows, value_loss_fn(), value_head=head)
    outcomes = [run_update(critic, rows, value_loss_fn(), max_tokens=budget) for budget in (2, 5, 1000)]
    for outcome in outcomes:
        check_against_truth(outcome, truth, rows, 2e-6)
        check_equal(outcome, outcomes[-1])


@pytest.mark.parametrize("forest", FORESTS)
def test_float32(checkpoint, worker, forest):
    rows, loss_fn = FORESTS[forest](), ppo_loss_fn(entropy_coeff=0.1)
    truth = hf_truth(checkpoint(), rows, loss_fn, calculate_entropy=True)
    for budget in (3, 1000):
        outcome = run_update(
            worker(dtype="float32"), rows, loss_fn, max_tokens=budget, dtype=torch.float32, calculate_entropy=True
        )
        check_against_truth(outcome, truth, rows, 1e-5)


def test_bfloat16_is_as_close_as_without_sharing(checkpoint, worker):
    """Error against float32, over all gradients, at most 1.1 times that of unshared bfloat16."""
    rows, loss_fn = step_rows(num_groups=4, num_steps=6), ppo_loss_fn()
    truth = hf_truth(checkpoint(), rows, loss_fn, dtype=torch.float32)
    unshared = make_worker(checkpoint(), dtype="bfloat16")

    def error(grads):
        return sum(float((grads[n].double() - g.double()).square().sum()) for n, g in truth.grads.items()) ** 0.5

    batch = {"dtype": torch.float32}
    base = error(run_update(unshared, rows, loss_fn, max_tokens=1000, **batch).grads)
    for budget in (8, 1000):
        shared = run_update(worker(dtype="bfloat16"), rows, loss_fn, max_tokens=budget, **batch)
        assert error(shared.grads) <= 1.1 * base


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45])
def test_waves_give_the_same_gradients(checkpoint, worker, share):
    rows, loss_fn = tree_rows(depth=4) + step_rows(), ppo_loss_fn()
    whole = run_update(worker(), rows, loss_fn, max_tokens=4)
    budget = int(whole.report.stats.kv_bytes_peak * share)
    waved = run_update(worker(kv_bytes=budget), rows, loss_fn, max_tokens=4)
    check_equal(waved, whole)
    assert waved.report.stats.num_waves > 1
    assert waved.report.kv_bytes_measured == waved.report.stats.kv_bytes_peak <= budget


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_prefixes_computed_again_give_the_same_gradients(checkpoint, worker, share):
    """Where the budget does not hold a root path: what it holds is still shared between micro-batches."""
    rows, loss_fn = tree_rows(depth=4) + step_rows(1, 4), ppo_loss_fn(entropy_coeff=0.1)
    max_tokens = max(len(row.input_ids) for row in rows)
    whole = run_update(worker(), rows, loss_fn, max_tokens=max_tokens, calculate_entropy=True)
    budget = max(1, int(whole.report.stats.kv_bytes_peak * share))
    outcome = run_update(worker(kv_bytes=budget), rows, loss_fn, max_tokens=max_tokens, calculate_entropy=True)
    check_equal(outcome, whole)
    check_against_truth(outcome, hf_truth(checkpoint(), rows, loss_fn, calculate_entropy=True), rows, 2e-6)
    stats = outcome.report.stats
    assert outcome.report.kv_bytes_measured == stats.kv_bytes_peak <= budget
    assert (stats.spine_tokens > 0) == (share > 0) and stats.num_tokens > stats.unique_tokens
    assert stats.unique_tokens - whole.report.stats.unique_tokens == stats.recomputed_tokens > 0
    forward = run_inference(worker(kv_bytes=budget), rows, max_tokens=max_tokens)
    for got, want in zip(forward.model_output["log_probs"], outcome.model_output["log_probs"], strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


def test_a_budget_that_cannot_be_kept_is_an_error(worker):
    with pytest.raises(MemoryBudgetError, match=r"psrl\.kv_cache_bytes allows 100"):
        run_update(worker(kv_bytes=100), tree_rows(), ppo_loss_fn(), max_tokens=2)
    rows = tree_rows(depth=4)
    with pytest.raises(MemoryBudgetError, match=r"psrl\.kv_cache_bytes allows 100"):
        run_update(worker(kv_bytes=100, kv_recompute=False), rows, ppo_loss_fn(), max_tokens=40)


def test_adam_gives_the_same_weights_under_every_plan(checkpoint):
    """Two steps through ``train_mini_batch``; sharing off gives them too."""
    from tests.helpers import batch_tensordict

    rows, weights = tree_rows() + step_rows(), []
    for psrl, budget in ((PSRLConfig(enable=False), 1000), *((PSRLConfig(), b) for b in (3, 1000))):
        worker = make_worker(checkpoint(), psrl=psrl, lr=1e-2)
        for _ in range(2):
            worker.train_mini_batch(batch_tensordict(rows, max_tokens=budget))
        weights.append(dict(worker.engine.get_per_tensor_param()[0]))
        weights[-1] = {name: value.clone() for name, value in weights[-1].items()}
    before = dict(make_worker(checkpoint()).engine.get_per_tensor_param()[0])
    assert max(float((weights[0][n] - before[n]).abs().max()) for n in before) > 1e-3
    for other in weights[1:]:
        assert max(relative_errors(other, weights[0]).values()) <= 1e-9


def test_a_coupled_loss_is_noticed(worker):
    """Declared a sum over samples, a loss that squares the batch is refused; the mini-batch scope takes it."""

    def squared(model_output, data, dp_group=None):
        predicted = [row[:-1] for row in model_output["log_probs"].unbind()]  # a last token predicts nothing
        return torch.cat(predicted).sum().square() * 1e-3, {}

    rows = step_rows()
    with pytest.raises(LossError, match=r"psrl\.loss_scope=mini_batch"):
        run_update(worker(loss_scope="sample"), rows, squared, max_tokens=8)
    a, b = (run_update(worker(), rows, squared, max_tokens=budget) for budget in (3, 1000))
    check_equal(a, b)


def test_no_target_at_all(worker):
    rows = [Row([5, 6, 7], [0, 0, 0]), Row([5, 6], [0, 0])]
    for budget, loss_mode in ((1, "vanilla"), (1000, "vanilla"), (1, "geo_mean")):
        outcome = run_update(worker(), rows, ppo_loss_fn(loss_mode), max_tokens=budget)
        assert outcome.loss == 0.0 and all(not grad.any() for grad in outcome.grads.values())


def test_runs_are_bit_identical(worker):
    rows, loss_fn = tree_rows() + step_rows(), ppo_loss_fn()
    a, b = (run_update(worker(dtype="float32"), rows, loss_fn, max_tokens=5, dtype=torch.float32) for _ in range(2))
    for name, grad in a.grads.items():
        assert torch.equal(grad, b.grads[name])


def test_supervised_loss(checkpoint, worker):
    """veRL's ``sft_loss`` with a loss mask over whole samples."""
    from functools import partial

    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import sft_loss

    from tests.helpers import batch_tensordict, nested

    rows, loss_fn = step_rows(), partial(sft_loss, None)
    truth = hf_truth(checkpoint(), rows, _mean_nll(rows))
    engine = worker().engine
    for budget in (3, 1000):
        data = batch_tensordict(rows, max_tokens=budget)
        data["loss_mask"] = nested([torch.tensor(row.loss_mask) for row in rows])
        tu.assign_non_tensor(data, calculate_entropy=False)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss_fn, forward_only=False)
            from psrl.integrations.verl.engine.export import full_grads

            assert max(relative_errors(full_grads(engine), truth.grads).values()) <= 2e-6
        assert float(sum(output["loss"])) == pytest.approx(truth.loss, rel=2e-6)


def _mean_nll(rows):
    def loss(model_output, data, dp_group=None):
        chosen = at_targets(model_output["log_probs"], rows)
        return -torch.cat(chosen).sum() / sum(len(x) for x in chosen), {}

    return loss
