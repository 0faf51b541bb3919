"""Attention backends against a dense float64 oracle, gradients included.

Shape legend: T queries, S keys, N query heads, K key/value heads, H head dimension.
"""

import math
import random

import numpy as np
import pytest
import torch

from psrl.config import ATTENTION_BACKENDS
from psrl.errors import ConfigError, UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend, attend_layout, dispatch, kernels, resolve_backend, sdpa

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
BACKENDS = ("reference", "sdpa")


def oracle(q_TNH, k_SKH, v_SKH, first_S, last_S, grad_TNH, scale=None):
    """Output and gradients of q, k, v in float64."""
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in (q_TNH, k_SKH, v_SKH)]
    repeat = q.shape[1] // k.shape[1]
    query_T1 = torch.arange(len(q))[:, None]
    mask_TS = (torch.as_tensor(first_S) <= query_T1) & (query_T1 < torch.as_tensor(last_S))
    scores = torch.einsum("tnh,snh->nts", q, k.repeat_interleave(repeat, 1)) * (scale or q.shape[2] ** -0.5)
    weights = scores.masked_fill(~mask_TS, -1e300).softmax(-1) * mask_TS
    out = torch.einsum("nts,snh->tnh", weights, v.repeat_interleave(repeat, 1))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_TNH.double())]


def random_inputs(num_queries, num_keys, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float64, seed=0):
    """q, k, v that require grad, and an output gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads), (num_queries, num_heads)]
    q, k, v, grad = (torch.randn(*shape, head_dim, dtype=torch.float64, generator=generator) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], grad.to(dtype)


def assert_matches_oracle(inputs, grad, first, last, backend, scale=None):
    out = attend(*inputs, first, last, scale=scale, backend=backend)
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    got = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    for name, actual, expected in zip(
        ("out", "dq", "dk", "dv"), got, oracle(*inputs, first, last, grad, scale), strict=True
    ):
        if expected.numel() == 0:
            continue
        error = float((actual.double() - expected).abs().max())
        assert error <= TOLERANCE[out.dtype] * max(float(expected.abs().max()), 1e-6), (name, error)
    return got


def random_forest(rng, num_path, num_tokens):
    """first, last: a cached path, then a random preorder forest that mostly goes on with the previous token."""
    ancestors, parents = [], []
    for token in range(num_tokens):
        if rng.random() < 0.2:
            ancestors = ancestors[: rng.randint(0, len(ancestors))]
        parents.append(ancestors[-1] if ancestors else -1)
        ancestors.append(token)
    last = list(range(1, num_tokens + 1))
    for token in reversed(range(num_tokens)):
        if parents[token] >= 0:
            last[parents[token]] = max(last[parents[token]], last[token])
    path = sorted((rng.randint(0, num_tokens) for _ in range(num_path)), reverse=True)
    return [0] * num_path + list(range(num_tokens)), path + last


def fan(root, leaves):
    """first, last of a root with leaves of the given lengths."""
    ends = root + np.cumsum(leaves)
    last = np.r_[np.full(root, ends[-1]), np.repeat(ends, leaves)]
    return np.arange(len(last)), last


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_forests(backend, dtype):
    rng = random.Random(f"{backend}{dtype}")
    for seed in range(25):
        num_path, num_tokens = rng.choice([0, 1, 5, 70]), rng.choice([1, 2, 17, 130])
        num_kv_heads, repeat, head_dim = rng.choice([1, 2]), rng.choice([1, 2, 4, 8]), rng.choice([1, 16, 40, 64])
        first, last = random_forest(rng, num_path, num_tokens)
        inputs, grad = random_inputs(
            num_tokens, num_path + num_tokens, num_kv_heads * repeat, num_kv_heads, head_dim, dtype, seed
        )
        assert_matches_oracle(inputs, grad, torch.tensor(first), torch.tensor(last), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_intervals(backend):
    rng = random.Random(5)
    for seed in range(40):
        num_queries, num_keys = rng.randint(1, 24), rng.randint(1, 24)
        first = [rng.randint(0, num_queries) for _ in range(num_keys)]
        last = [rng.randint(0, num_queries) for _ in range(num_keys)]
        inputs, grad = random_inputs(num_queries, num_keys, seed=seed)
        assert_matches_oracle(inputs, grad, first, last, backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_tiles(dtype):
    # Past the sizes (192, 768 queries; 512 keys) at which the CPU kernel changes its blocking.
    first, last = fan(600, [300, 5, 5, 40])
    first, last = np.r_[[0] * 530, first], np.r_[[950] * 530, last]
    inputs, grad = random_inputs(950, 1480, num_heads=2, num_kv_heads=1, dtype=dtype)
    assert_matches_oracle(inputs, grad, first, last, "sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_keys_that_see_nothing(backend):
    # Query 2 and keys 1 and 4 are alone; their gradients are exactly zero.
    first, last = [0, 3, 3, 4, 2], [2, 3, 5, 5, 2]
    inputs, grad = random_inputs(5, 5)
    out, dq, dk, dv = assert_matches_oracle(inputs, grad, first, last, backend)
    assert not out[2].any() and not dq[2].any() and not dk[[1, 4]].any() and not dv[[1, 4]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_empty(backend, num_queries, num_keys):
    inputs, grad = random_inputs(num_queries, num_keys)
    got = assert_matches_oracle(inputs, grad, [0] * num_keys, [0] * num_keys, backend)
    assert not any(x.any() for x in got)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_key_leaves_q_and_k_no_gradient(backend, dtype):
    inputs, grad = random_inputs(3, 4, dtype=dtype)
    out, dq, dk, _ = assert_matches_oracle(inputs, grad, [0, 0, 1, 2], [0, 1, 2, 3], backend)
    assert torch.equal(out, inputs[2][1:].repeat_interleave(2, 1)) and not dq.any() and not dk.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_and_strided_inputs(backend):
    first, last = random_forest(random.Random(1), 6, 20)
    fused = torch.randn(26, 8, 16, dtype=torch.float64)
    q = fused[6:, :4].requires_grad_()
    k = torch.randn(2, 26, 16, dtype=torch.float64).transpose(0, 1).requires_grad_()
    v = torch.randn(26, 16, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()
    grad = torch.ones((), dtype=torch.float64).expand(20, 4, 16)
    assert_matches_oracle([q, k, v], grad, first, last, backend, scale=0.7)


def test_large_scores_do_not_overflow():
    first, last = random_forest(random.Random(2), 4, 30)
    inputs, grad = random_inputs(30, 34, dtype=torch.float32)
    inputs[0] = (inputs[0].detach() * 300).requires_grad_()
    actual, expected = (
        torch.autograd.grad(attend(*inputs, first, last, backend=backend), inputs, grad) for backend in BACKENDS
    )
    assert all(a.isfinite().all() for a in actual)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 5), (5, 16)])
def test_value_head_dim(head_dim, value_dim):
    (q, k, v), grad = random_inputs(9, 12)
    first, last = random_forest(random.Random(1), 3, 9)
    inputs = [x[..., :dim].detach().requires_grad_() for x, dim in ((q, head_dim), (k, head_dim), (v, value_dim))]
    outs = [attend(*inputs, first, last, backend=backend) for backend in ("reference", "sdpa")]
    assert outs[0].shape == (9, 4, value_dim)
    torch.testing.assert_close(outs[1], outs[0])
    expected, actual = (torch.autograd.grad(out, inputs, grad[..., :value_dim]) for out in outs)
    torch.testing.assert_close(actual, expected)


def test_runs_are_bit_equal():
    first, last = random_forest(random.Random(3), 50, 300)
    layout = AttentionLayout.build(first, last, 300)
    inputs, grad = random_inputs(300, 350, num_heads=8, dtype=torch.float32)

    def run():
        out = attend_layout(*inputs, layout)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_one_sequence_is_bit_equal_to_torch():
    (q, k, v), grad = random_inputs(300, 300, dtype=torch.float32)
    out = attend_layout(q, k, v, AttentionLayout.from_cu_seqlens([0, 300]))
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    expected = expected.squeeze(0).transpose(0, 1)
    assert torch.equal(out, expected)
    grads = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, expected))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


class CountingKernel(kernels.CpuFlashKernel):
    """Notes (pass, batch, queries, keys, is_causal, key/value heads) of every call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, q, k, v, is_causal, scale):
        self.calls.append(("forward", q.shape[0], q.shape[2], k.shape[2], is_causal, k.shape[1]))
        return super().forward(q, k, v, is_causal, scale)

    def backward(self, grad_out, q, k, v, *rest):
        self.calls.append(("backward", q.shape[0], q.shape[2], k.shape[2], rest[2], k.shape[1]))
        return super().backward(grad_out, q, k, v, *rest)


def test_kernel_calls(monkeypatch):
    counting = CountingKernel()
    monkeypatch.setitem(kernels.KERNELS, "cpu", counting)
    # Six path keys; a root of 10 whose three leaves have 4, 3 and 3 tokens. Heads are not repeated.
    first, last = fan(10, [4, 3, 3])
    first, last = np.r_[[0] * 6, first], np.r_[[20] * 6, last]
    inputs, grad = random_inputs(20, 26, num_heads=8)
    assert_matches_oracle(inputs, grad, first, last, "auto")
    shapes = [(1, 14, 14, True, 2), (2, 3, 3, True, 2), (1, 20, 6, False, 2), (1, 6, 10, False, 2)]
    assert counting.calls == [("forward", *x) for x in shapes] + [("backward", *x) for x in shapes]


def test_heads_are_repeated_for_kernels_that_cannot_group_them(monkeypatch):
    """Before torch 2.13 the CPU kernel needs as many key/value heads as query heads."""
    monkeypatch.setitem(kernels.KERNELS, "cpu", kernels.CpuFlashKernel(takes_grouped_heads=False))
    first, last = fan(5, [3, 4])
    inputs, grad = random_inputs(len(first), len(first), num_heads=4, num_kv_heads=2)
    assert_matches_oracle(inputs, grad, first, last, "sdpa")


def test_half_precision_loses_no_more_than_one_unshared_call():
    layout = AttentionLayout.build(*fan(200, [40, 90, 60, 75]), 465)
    inputs, grad = random_inputs(465, 465, num_heads=8, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    out = attend_layout(*inputs, layout)
    shared = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    exact = oracle(*inputs, layout.first_S, layout.last_S, grad)

    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(shared, exact, strict=True)]
    # One causal call of 240 tokens loses 2.0e-3, 2.5e-3, 5e-3 and 5e-3; rounding alone costs 1.6e-3.
    assert max(errors) < 2.0e-3, errors


def test_cuda_calls_fit_their_signatures():
    # On meta tensors the CUDA kernels check arguments and give shapes, without a device.
    layout = AttentionLayout.build(*fan(100, [20, 20, 20, 7]), 167)
    q, k, v = (
        torch.empty(167, heads, 64, dtype=torch.bfloat16, device="meta").transpose(0, 1).unsqueeze(0)
        for heads in (8, 2, 2)
    )
    kernel = kernels.CudaFlashKernel()
    out, lse, extra = sdpa._forward_tiles(q, k, v, layout, 0.125, kernel)
    assert (out.shape, out.dtype, lse.shape, len(extra)) == (q.shape, torch.float32, (1, 8, 167), 2)
    out = out.bfloat16()
    grads = sdpa._backward_tiles(out, q, k, v, out, lse, layout, 0.125, kernel, extra)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(UnsupportedError, match="multiples of 8 up to 256, got 12"):
        kernel.forward(q[..., :12], k[..., :12], v[..., :12], False, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cuda_matches_oracle(dtype):
    first, last = random_forest(random.Random(4), 70, 300)
    layout = AttentionLayout.build(first, last, 300)
    inputs, grad = random_inputs(300, 370, num_heads=8, head_dim=64, dtype=dtype)
    on_device = [x.detach().cuda().requires_grad_() for x in inputs]
    runs = []
    for _ in range(2):
        out = attend_layout(*on_device, layout)
        runs.append([out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out, on_device, grad.cuda()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for actual, expected in zip(runs[0], oracle(*inputs, first, last, grad), strict=True):
        assert float((actual.double() - expected).abs().max() / expected.abs().max()) < TOLERANCE[dtype]


def test_unknown_backend():
    inputs, _ = random_inputs(2, 2)
    with pytest.raises(ConfigError, match="must be one of auto, reference, sdpa, triton, flash, flex, got 'flash9'"):
        attend(*inputs, [0, 1], [2, 2], backend="flash9")
    for backend in ("auto", "reference", "sdpa"):
        assert attend(*inputs, [0, 1], [2, 2], backend=backend).shape == (2, 4, 16)


def test_auto_is_triton_on_cuda():
    assert [resolve_backend("auto", device) for device in ("cpu", "cuda")] == ["sdpa", "triton"]
    assert [resolve_backend(name, "cuda") for name in ATTENTION_BACKENDS[1:]] == list(ATTENTION_BACKENDS[1:])


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_backends_for_cuda_refuse_the_cpu(backend):
    inputs, _ = random_inputs(2, 2)
    with pytest.raises(UnsupportedError, match=f"'{backend}' runs on cuda, got tensors on cpu: set .*sdpa"):
        attend(*inputs, [0, 1], [2, 2], backend=backend)


def test_triton_backend_without_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._load.cache_clear()
    with pytest.raises(UnsupportedError, match="needs Triton: pip install triton"):
        attend(*random_inputs(2, 2)[0], [0, 1], [2, 2], backend="triton")


def test_unsupported_device_or_dtype_is_an_error():
    with pytest.raises(UnsupportedError, match="bfloat16 or float16 on cuda, got float32"):
        kernels.flash_kernel(torch.device("cuda"), torch.float32)
    with pytest.raises(UnsupportedError, match="runs on cpu and cuda, got tensors on meta"):
        kernels.flash_kernel(torch.device("meta"), torch.float32)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 4, 8), (3, 2, 8), (3, 2, 8), "is for 2 queries and 2 keys, got 2 and 3"),
        ((2, 4, 8), (2, 3, 8), (2, 3, 8), "multiple of key/value heads, got 4 and 3"),
        ((2, 4, 8), (2, 2, 6), (2, 2, 6), "same head dim, got 8 and 6"),
        ((2, 4, 8), (2, 2, 8), (2, 1, 8), "same tokens and heads"),
        ((1, 2, 4, 8), (2, 2, 8), (2, 2, 8), r"must be \[tokens, heads, head dim\], got q \(1, 2, 4, 8\)"),
    ],
)
def test_bad_shapes(q, k, v, message):
    layout = AttentionLayout.build([0, 1], [2, 2], 2)
    with pytest.raises(ValueError, match=message):
        attend_layout(torch.zeros(q), torch.zeros(k), torch.zeros(v), layout)


def test_mixed_or_integer_dtypes():
    layout = AttentionLayout.build([0, 1], [2, 2], 2)
    q = torch.zeros(2, 4, 8)
    with pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float64, torch.float32"):
        attend_layout(q, q.double(), q, layout)
    with pytest.raises(ValueError, match=r"must be floating point, got torch.int64"):
        attend_layout(q.long(), q.long(), q.long(), layout)


def test_keys_beyond_the_queries():
    inputs, _ = random_inputs(3, 3)
    with pytest.raises(ValueError, match=r"number of queries \(3\), got 0 and 4"):
        attend(*inputs, torch.arange(3), torch.tensor([3, 3, 4]))


def test_no_gradient_wanted():
    inputs, _ = random_inputs(4, 4)
    q, k, v = (x.detach() for x in inputs)
    out = attend(q, k, v, range(4), [4] * 4)
    assert not out.requires_grad
    (grad_v,) = torch.autograd.grad(attend(q, k, v.requires_grad_(), range(4), [4] * 4).sum(), v)
    assert math.isclose(float(grad_v.sum()), 4 * 4 * 16, rel_tol=1e-12)
