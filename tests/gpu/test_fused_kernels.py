"""``use_fused_kernels`` on a CUDA device: veRL's fused linear cross-entropy against logits, alone and in engines."""

import functools

import pytest
import torch

from psrl.config import PSRLConfig
from tests.helpers import hf_truth, make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, step_rows, tree_rows
from tests.helpers.fused import BRANCHING, edge_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 1e-2, torch.float16: 5e-3}
"""The kernels round float32 factors to TF32."""
LOSS = ppo_loss_fn(entropy_coeff=0.1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [BRANCHING, [0], sorted([*range(300), *range(0, 300, 7)])], ids=len)
@pytest.mark.parametrize("vocab", [300, 20_000])
def test_edges(rows, vocab, dtype):
    errors = edge_errors(rows, vocab, 0.7, dtype, device="cuda", hidden=256)
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(tied, vocab=1000):
        return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tied, hidden=128, head_dim=64, vocab=vocab)

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(tied, shares, fused, vocab=1000):
        psrl = PSRLConfig(enable=shares, attention_backend="triton")
        return make_worker(checkpoint(tied, vocab), psrl=psrl, dtype="bfloat16", model={"use_fused_kernels": fused})

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("forest", FORESTS)
def test_engine_loses_no_more_than_with_logits(checkpoint, worker, forest, tied):
    """Error against float32; a second update has the same bits."""
    rows, batch = FORESTS[forest](), {"dtype": torch.float32, "calculate_entropy": True}
    truth = hf_truth(checkpoint(tied), rows, LOSS, **batch)

    def error(outcome):
        differences = [outcome.grads[name].cpu().double() - grad.double() for name, grad in truth.grads.items()]
        return sum(float(x.square().sum()) for x in differences) ** 0.5

    fused = run_update(worker(tied, True, True), rows, LOSS, max_tokens=6, **batch)
    logits = run_update(worker(tied, True, False), rows, LOSS, max_tokens=6, **batch)
    assert error(fused) <= 1.1 * error(logits)
    again = run_update(worker(tied, True, True), rows, LOSS, max_tokens=6, **batch)
    assert all(torch.equal(grad, again.grads[name]) for name, grad in fused.grads.items())
    inferred = run_inference(worker(tied, True, True), rows, max_tokens=6, **batch)
    for kind, values in inferred.model_output.items():
        for got, want in zip(values, fused.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=2e-2, atol=2e-2)


def test_engine_equals_verls_own_fused_path(worker):
    """Where one micro-batch holds every row, both give the kernels the same numbers."""
    rows, batch = tree_rows() + step_rows(), {"dtype": torch.float32, "calculate_entropy": True}
    shared = run_update(worker(False, True, True), rows, LOSS, max_tokens=1000, **batch)
    unshared = run_update(worker(False, False, True), rows, LOSS, max_tokens=1000, **batch)
    assert max(relative_errors(shared.grads, unshared.grads).values()) <= 5e-2


def test_logits_never_exist(worker):
    """An update's peak is below that with logits by most of what these take."""
    rows, num_columns = tree_rows(5), 50_000
    peaks = {}
    for fused in (False, True):
        made = worker(False, True, fused, num_columns)
        run_update(made, rows, LOSS, max_tokens=10_000, dtype=torch.float32)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcome = run_update(made, rows, LOSS, max_tokens=10_000, dtype=torch.float32)
        peaks[fused] = torch.cuda.max_memory_allocated() - before
    num_rows = outcome.report.stats.unique_tokens // 2  # about half are responses
    assert peaks[False] - peaks[True] >= num_rows * num_columns * 4
