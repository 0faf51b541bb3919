"""Attention backends on a CUDA device against a dense float64 oracle: ``pytest -m gpu tests/gpu``."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from psrl.runtime.attention import AttentionLayout, attend_layout
from tests.unit.test_attention import fan, oracle, random_forest, random_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def run(inputs, grad, layout, backend):
    on_device = [x.detach().cuda().requires_grad_() for x in inputs]
    out = attend_layout(*on_device, layout, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, on_device, grad.cuda())]


def errors(got, inputs, grad, layout):
    exact = oracle(*inputs, layout.first_S, layout.last_S, grad)
    return [float((a.cpu().double() - b).norm() / b.norm().clamp_min(1e-3)) for a, b in zip(got, exact, strict=True)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", ["triton", "flash", "flex"])
def test_random_forests_match_the_oracle(backend, head_dim, dtype):
    if backend == "flash" and dtype == torch.float32:
        pytest.skip("flash-attn has no float32 kernel")
    rng = random.Random(f"{backend}{head_dim}{dtype}")
    for seed in range(10):
        num_path, num_tokens, group = rng.choice([0, 1, 70, 700]), rng.choice([1, 17, 300, 1000]), rng.choice([1, 4, 8])
        layout = AttentionLayout.build(*map(np.array, random_forest(rng, num_path, num_tokens)), num_tokens)
        inputs, grad = random_inputs(num_tokens, num_path + num_tokens, group, 1, head_dim, dtype, seed)
        assert max(errors(run(inputs, grad, layout, backend), inputs, grad, layout)) <= TOLERANCE[dtype]


def test_mla_head_dims():
    layout = AttentionLayout.build(*fan(200, [40, 90, 60]), 390)
    (q, k, v), grad = random_inputs(390, 390, 4, 4, 192, torch.bfloat16)
    inputs, grad = [q, k, v[..., :128].detach().requires_grad_()], grad[..., :128]
    got = run(inputs, grad, layout, "triton")
    # The oracle's heads are as wide as v's: pad v, and read the part that is not padding.
    wide_v = torch.nn.functional.pad(inputs[2].detach(), (0, 64)).requires_grad_()
    exact = oracle(q, k, wide_v, layout.first_S, layout.last_S, torch.nn.functional.pad(grad, (0, 64)))
    exact = [exact[0][..., :128], exact[1], exact[2], exact[3][..., :128]]
    for actual, expected in zip(got, exact, strict=True):
        assert float((actual.cpu().double() - expected).norm() / expected.norm()) <= 1e-2


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_runs_are_bit_equal(backend):
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(4), 3000, 900)), 900)
    inputs, grad = random_inputs(900, 3900, 8, 2, 128, torch.bfloat16)
    runs = [run(inputs, grad, layout, backend) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_half_precision_loses_little_more_than_the_unshared_run():
    """Error against float64 at most 1.1 times that of the same samples as independent sequences."""
    prompt, leaves = 400, [300, 200, 250]
    layout = AttentionLayout.build(*fan(prompt, leaves), prompt + sum(leaves))
    inputs, grad = random_inputs(layout.num_queries, layout.num_keys, 8, 2, 128, torch.bfloat16)
    shared = errors(run(inputs, grad, layout, "triton"), inputs, grad, layout)[0]
    starts = np.r_[prompt, prompt + np.cumsum(leaves)]
    samples = [np.r_[np.arange(prompt), np.arange(a, b)] for a, b in pairwise(starts)]
    unshared = AttentionLayout.from_cu_seqlens(np.cumsum([0, *map(len, samples)]))
    rows = torch.from_numpy(np.concatenate(samples))
    packed = [x.detach()[rows].requires_grad_() for x in inputs]
    alone = errors(run(packed, grad[rows], unshared, "flash"), packed, grad[rows], unshared)[0]
    assert shared <= 1.1 * alone


def test_a_new_length_compiles_nothing():
    from psrl.runtime.attention.triton.forward import forward_kernel

    counts = []
    for num_tokens in (64, 65, 500, 1, 1001):
        layout = AttentionLayout.build(*fan(num_tokens, [3]), num_tokens + 3)
        inputs, grad = random_inputs(num_tokens + 3, num_tokens + 3, 4, 2, 64, torch.bfloat16)
        run(inputs, grad, layout, "triton")
        counts.append(len(forward_kernel.device_caches[torch.cuda.current_device()][0]))
    assert counts == counts[:1] * 5


def test_flex_compiles_once_for_all_lengths():
    torch._dynamo.reset()
    from psrl.runtime.attention.flex import _compiled

    _compiled.cache_clear()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for num_tokens in (300, 641, 1000):
        layout = AttentionLayout.build(*fan(num_tokens, [30, 40]), num_tokens + 70)
        inputs, grad = random_inputs(num_tokens + 70, num_tokens + 70, 4, 2, 64, torch.bfloat16)
        run(inputs, grad, layout, "flex")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
