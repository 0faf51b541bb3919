"""The cached path read in its blocks on a CUDA device: the kernels against a dense oracle, and whole engines."""

import functools
import random

import numpy as np
import pytest
import torch

from psrl.config import PSRLConfig
from psrl.runtime.attention import AttentionLayout
from tests.helpers import hf_truth, make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, step_rows, tree_rows
from tests.helpers.in_place import gather_path, watched
from tests.unit.test_attention import oracle, random_forest, random_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LOSS = ppo_loss_fn(entropy_coeff=0.1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels(head_dim, dtype):
    """Blocks of three layers with room for more tokens; accumulators are not empty."""
    from psrl.runtime.attention.triton import CachedPath, PathGrads, attend_path

    lens, num_local, layer = [1, 300, 77], 500, 1
    num_path = sum(lens)
    forest = random_forest(random.Random(head_dim), num_path, num_local)
    layout = AttentionLayout.build(*map(np.array, forest), num_local)
    inputs, grad = random_inputs(num_local, num_path + num_local, 4, 2, head_dim, dtype)
    exact = oracle(*inputs, layout.first_S, layout.last_S, grad)
    q, k, v = (x.detach().cuda() for x in inputs)
    blocks = [[torch.full((3, n + 5, *x.shape[1:]), float("nan"), dtype=dtype, device="cuda") for n in lens]
              for x in (k, v)]  # fmt: skip
    for parts, x in zip(blocks, (k, v), strict=True):
        for block, part in zip(parts, x[:num_path].split(lens), strict=True):
            block[layer, : len(part)] = part
    totals = [[torch.full(x.shape, 0.5, device="cuda") for x in parts] for parts in blocks]
    local = [x.clone().requires_grad_() for x in (q, k[num_path:], v[num_path:])]
    path = CachedPath.build(*blocks, lens)
    out = attend_path(*local, layout, path, layer, lambda: PathGrads.build(*totals, lens))
    dq, *local_grads = torch.autograd.grad(out, local, grad.cuda())
    got = [out, dq]
    for parts, local_grad in zip(totals, local_grads, strict=True):
        got.append(torch.cat([*(x[layer, :n] - 0.5 for x, n in zip(parts, lens, strict=True)), local_grad.float()]))
        assert all(bool((x[[0, 2]] == 0.5).all() & (x[:, n:] == 0.5).all()) for x, n in zip(parts, lens, strict=True))
    for actual, expected in zip(got, exact, strict=True):
        error = float((actual.detach().cpu().double() - expected).norm() / expected.norm())
        assert error <= TOLERANCE[dtype]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=64)


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(dtype, recompute=None, gathers=False):
        psrl = PSRLConfig(attention_backend="triton")
        made = make_worker(checkpoint, psrl=psrl, dtype=dtype, recompute=recompute)
        return gather_path(made) if gathers else made

    return make


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("forest", FORESTS)
def test_engine_in_float32(checkpoint, worker, forest, recompute):
    rows, batch = FORESTS[forest](), {"dtype": torch.float32, "calculate_entropy": True}
    truth = hf_truth(checkpoint, rows, LOSS, **batch)
    with watched() as watch:
        outcome = run_update(worker("float32", recompute), rows, LOSS, max_tokens=3, **batch)
    assert watch.calls == {
        "path_blocks": watch.executions_with_path,
        "path_grads": len(watch.backwards_with_path),
        "drop": watch.executions_with_path,
    }
    assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    gathered = run_update(worker("float32", recompute, gathers=True), rows, LOSS, max_tokens=3, **batch)
    assert max(relative_errors(outcome.grads, gathered.grads).values()) <= 1e-5
    assert max(relative_errors(outcome.grads, truth.grads).values()) <= 1e-4
    inferred = run_inference(worker("float32", recompute), rows, max_tokens=3, **batch)
    for kind, values in inferred.model_output.items():
        for got, want in zip(values, outcome.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_engine_in_bfloat16(checkpoint, worker):
    """Accumulators are float32; the error against float32 is no larger than that of gathered paths."""
    rows, batch = tree_rows() + step_rows(), {"dtype": torch.float32, "calculate_entropy": True}
    truth = hf_truth(checkpoint, rows, LOSS, **batch)

    def error(outcome):
        differences = [outcome.grads[name].cpu().double() - grad.double() for name, grad in truth.grads.items()]
        return sum(float(x.square().sum()) for x in differences) ** 0.5

    with watched() as watch:
        in_place = run_update(worker("bfloat16"), rows, LOSS, max_tokens=6, **batch)
    assert watch.accumulator_dtypes == {torch.float32} and "read" not in watch.calls
    gathered = run_update(worker("bfloat16", gathers=True), rows, LOSS, max_tokens=6, **batch)
    assert error(in_place) <= 1.1 * error(gathered)
