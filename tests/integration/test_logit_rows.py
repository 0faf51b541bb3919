"""``psrl.max_logit_rows``: the same gradients with the logits of a few rows at a time."""

import functools
import itertools

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.integrations.megatron.output_layer import PostponedOutputLayer
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import step_rows, tree_rows
from tests.helpers.parallel import Job, Layout, reference, run_job
from tests.helpers.parallel_checks import check_job
from tests.helpers.ranks import RankPool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(tied):
        return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tied)

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(tied, max_logit_rows, recompute=None):
        return make_worker(checkpoint(tied), psrl=PSRLConfig(max_logit_rows=max_logit_rows), recompute=recompute)

    return make


@pytest.fixture
def projected(monkeypatch):
    """Numbers of rows that the output layer was given."""
    numbers = []
    logits = PostponedOutputLayer.logits

    def counted(self, hidden_RD):
        numbers.append(len(hidden_RD))
        return logits(self, hidden_RD)

    monkeypatch.setattr(PostponedOutputLayer, "logits", counted)
    return numbers


@pytest.mark.parametrize("max_rows", [None, 2])
def test_the_weights_gradient_is_ready_in_a_last_micro_batch_without_an_edge(checkpoint, worker, projected, max_rows):
    """With ``overlap_grad_reduce`` Megatron-Core waits for every parameter's gradient in the last micro-batch, here the
    spine's first, of a prompt. Twice, as it learns in the first mini-batch which parameters there are."""
    overlapping = make_worker(
        checkpoint(False), psrl=PSRLConfig(max_logit_rows=max_rows), override_ddp_config={"overlap_grad_reduce": True}
    )
    rows, loss = step_rows(1, 2), ppo_loss_fn()
    want = run_update(worker(False, None), rows, loss, max_tokens=6)
    for _ in range(2):
        got = run_update(overlapping, rows, loss, max_tokens=6)
        for name, grad in want.grads.items():
            torch.testing.assert_close(got.grads[name], grad, rtol=1e-9, atol=1e-12)
    assert (max(projected, default=0) == 2) == (max_rows is not None)


DEFAULT = ((1, False, 5), (1, True, 1000), (3, True, 5), (3, False, 1000), (1000, True, 5))
"""Cases of the default suite; the others are slow."""


@pytest.mark.parametrize(
    ("max_rows", "tied", "budget"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
        for case in itertools.product((1, 3, 1000), (False, True), (5, 1000))
    ],
)
def test_gradients_are_those_of_all_rows_at_once(worker, projected, tied, max_rows, budget):
    rows, loss_fn = tree_rows() + step_rows(), ppo_loss_fn(entropy_coeff=0.1)
    want = run_update(worker(tied, None), rows, loss_fn, max_tokens=budget, calculate_entropy=True)
    assert projected == []
    got = run_update(worker(tied, max_rows), rows, loss_fn, max_tokens=budget, calculate_entropy=True)
    assert max(projected) <= max_rows
    assert max(projected) == max_rows or max_rows == 1000
    assert got.loss == pytest.approx(want.loss, abs=1e-12)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-11, atol=1e-13, msg=name)
    for kind in ("log_probs", "entropy"):
        torch.testing.assert_close(got.model_output[kind], want.model_output[kind], rtol=1e-12, atol=1e-12)


def test_forward_only(worker, projected):
    rows = tree_rows()
    want = run_inference(worker(False, None), rows, max_tokens=5, calculate_entropy=True)
    got = run_inference(worker(False, 3), rows, max_tokens=5, calculate_entropy=True)
    assert max(projected) == 3
    torch.testing.assert_close(got.model_output, want.model_output, rtol=1e-12, atol=1e-12)


def test_rows_without_an_edge_in_a_rank_that_recomputes(worker):
    """A spine micro-batch without a target has one row that no edge owns; its backward has to run all the same."""
    rows, loss_fn = step_rows(), ppo_loss_fn()
    want = run_update(worker(False, None), rows, loss_fn, max_tokens=1)
    got = run_update(worker(False, 2, "full"), rows, loss_fn, max_tokens=1)
    for name, grad in want.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2), id="tp"),
        pytest.param(Layout(pp=2), id="pp", marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), id="cp", marks=pytest.mark.slow),
    ],
)
def test_layouts(tmp_path_factory, checkpoint, layout):
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    try:
        job = Job(checkpoint(True), [step_rows()], psrl={"max_logit_rows": 2})
        want = reference(job, f"logit rows {job.checkpoint}")
        check_job(job, pool.run(run_job, job, layout), want, 1e-9)
    finally:
        pool.close()
