"""The ``flash`` backend: which calls a layout becomes, and their merge, on PyTorch's CPU flash kernel.

The packages' kernels need a GPU (``tests/gpu``); the batching, the merge and the backward pass are the same code here.
"""

import random
import sys

import numpy as np
import pytest
import torch

from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, flash, flash_kernels
from psrl.runtime.attention.flash_kernels import Segments, TorchVarlenKernel
from psrl.runtime.attention.kernels import CpuFlashKernel
from tests.unit.test_attention import fan, oracle, random_forest, random_inputs


class CpuVarlenKernel:
    """One call of the CPU kernel a segment."""

    name = "cpu"

    def __init__(self):
        self.kernel = CpuFlashKernel()
        self.calls = []

    def takes(self, head_dim, v_head_dim):
        return True

    def parts(self, segments):
        offsets = zip(segments.cu_q.tolist(), segments.cu_q.tolist()[1:], segments.cu_k.tolist(),
                      segments.cu_k.tolist()[1:], strict=False)  # fmt: skip
        return [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in offsets]

    def forward(self, q, k, v, segments, scale):
        self.calls.append((segments.is_causal, segments.cu_q.tolist(), segments.cu_k.tolist()))
        outs, lses = [], []
        for of_q, of_k in self.parts(segments):
            heads_first = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k]))
            out, lse, _ = self.kernel.forward(*heads_first, segments.is_causal, scale)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1).float(), ()

    def backward(self, grad_out, q, k, v, out, lse, segments, scale, extra):
        grads = []
        for of_q, of_k in self.parts(segments):
            rows = (grad_out[of_q], q[of_q], k[of_k], v[of_k], out[of_q])
            tensors = [x.transpose(0, 1)[None] for x in rows]
            part = self.kernel.backward(*tensors, lse[None, :, of_q].contiguous(), segments.is_causal, scale, ())
            grads.append([x[0].transpose(0, 1) for x in part])
        return tuple(torch.cat(x) for x in zip(*grads, strict=True))


def run(inputs, grad, layout, scale=0.25):
    kernel = CpuVarlenKernel()
    out = flash.varlen_attention(*inputs, layout, scale, kernel)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)], kernel.calls


def test_random_forests_match_the_oracle():
    rng = random.Random(7)
    for seed in range(25):
        num_path, num_tokens = rng.choice([0, 1, 5, 70]), rng.choice([1, 2, 17, 90])
        num_kv_heads, repeat = rng.choice([1, 2]), rng.choice([1, 4])
        layout = AttentionLayout.build(*random_forest(rng, num_path, num_tokens), num_tokens)
        inputs, grad = random_inputs(
            num_tokens, num_path + num_tokens, num_kv_heads * repeat, num_kv_heads, 16, torch.float32, seed
        )
        got, _ = run(inputs, grad, layout)
        expected = oracle(*inputs, layout.first_S, layout.last_S, grad, 0.25)
        for name, actual, exact in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            assert float((actual - exact).abs().max()) <= 1e-5 * max(float(exact.abs().max()), 1e-3), name


def test_random_intervals_match_the_oracle():
    rng = random.Random(8)
    for seed in range(25):
        num_queries, num_keys = rng.randint(1, 24), rng.randint(1, 24)
        first, last = ([rng.randint(0, num_queries) for _ in range(num_keys)] for _ in range(2))
        layout = AttentionLayout.build(first, last, num_queries)
        inputs, grad = random_inputs(num_queries, num_keys, dtype=torch.float32, seed=seed)
        got, _ = run(inputs, grad, layout)
        for actual, exact in zip(got, oracle(*inputs, first, last, grad, 0.25), strict=True):
            assert float((actual - exact).abs().max()) <= 1e-5 * max(float(exact.abs().max()), 1e-3)


def test_calls_of_a_path_and_two_trees():
    # Six path keys; two trees: a root of 10 whose leaves have 4 and 3 tokens, a root of 5 with leaves of 2 and 2.
    (first, last), (first_2, last_2) = fan(10, [4, 3]), fan(5, [2, 2])
    layout = AttentionLayout.build(np.r_[[0] * 6, first, first_2 + 17], np.r_[[26] * 6, last, last_2 + 17], 26)
    inputs, grad = random_inputs(26, 32, dtype=torch.float32)
    _, calls = run(inputs, grad, layout)
    assert calls == [
        # Triangles: each root with its first leaf, and the other leaves; then the path; then the roots' other leaves.
        (True, [0, 14, 17, 24, 26], [0, 14, 17, 24, 26]),
        (False, [0, 26], [0, 6]),
        (False, [0, 3, 5], [0, 10, 15]),
    ]


def test_a_wide_fan_takes_two_calls_and_a_comb_one_a_level():
    wide = AttentionLayout.build(*fan(5, [3, 2, 4] * 20), 185)
    assert len(flash.plan_calls(wide.tiles, wide.num_queries, wide.num_keys)) == 2
    # A trunk of 6 single tokens, each with a leaf beside it: preorder t0 t1 ... t5 l5 ... l0 .
    first, last = np.arange(12), np.array([12, 11, 10, 9, 8, 7, 7, 8, 9, 10, 11, 12])
    comb = AttentionLayout.build(first, last, 12)
    assert len(flash.plan_calls(comb.tiles, 12, 12)) <= 5


def test_runs_are_bit_equal():
    layout = AttentionLayout.build(*random_forest(random.Random(3), 50, 120), 120)
    inputs, grad = random_inputs(120, 170, num_heads=8, dtype=torch.float32)
    runs = [run(inputs, grad, layout)[0] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_torch_calls_fit_their_signatures():
    # On meta tensors the CUDA kernel checks its arguments and gives shapes, without a device.
    q, k, v = (
        torch.empty(n, heads, 64, dtype=torch.bfloat16, device="meta") for n, heads in ((9, 8), (20, 2), (20, 2))
    )
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    segments, kernel = Segments(offsets, offsets, 5, 12, False), TorchVarlenKernel()
    out, lse, extra = kernel.forward(q, k, v, segments, 0.125)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 9), torch.float32)
    grads = kernel.backward(out, q, k, v, out, lse, segments, 0.125, extra)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert not torch.are_deterministic_algorithms_enabled()


def test_choice_of_the_kernel(monkeypatch):
    class Installed:
        def __init__(self):
            self.name = type(self).__name__

        def takes(self, head_dim, v_head_dim):
            return head_dim <= 128

    flash2, flash3, flash4 = (type(name, (Installed,), {}) for name in ("two", "three", "four"))
    for name, kind in (("Flash2Kernel", flash2), ("Flash3Kernel", flash3), ("Flash4Kernel", flash4)):
        monkeypatch.setattr(flash_kernels, name, kind)
    monkeypatch.setattr(flash_kernels, "is_installed", lambda module: True)
    choose = flash_kernels._choose.__wrapped__
    assert [choose(major, 128, 128).name for major in (8, 9, 10)] == ["two", "three", "four"]
    assert choose(9, 256, 256).name == "torch"
    with pytest.raises(UnsupportedError, match=r"no kernel for head dims 192 and 128 \(has two, torch\)"):
        choose(8, 192, 128)
    monkeypatch.setattr(flash_kernels, "is_installed", lambda module: False)
    assert choose(9, 128, 128).name == "torch"


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    """As one that was compiled for another torch: no silent fallback to PyTorch's own kernel."""
    monkeypatch.setattr(flash_kernels, "is_installed", lambda module: module == "flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    with pytest.raises(UnsupportedError, match=r"flash_attn\.flash_attn_interface is installed but cannot be imported"):
        flash_kernels._choose.__wrapped__(8, 128, 128)


def test_missing_package_is_not_found():
    assert not flash_kernels.is_installed("no_such_package.interface") and flash_kernels.is_installed("torch.nn")
