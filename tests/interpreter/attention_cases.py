"""The Triton kernels in Triton's interpreter, against a dense float64 oracle.

``tests/unit/test_triton_attention.py`` runs this file in a process with TRITON_INTERPRET=1, which has to be set before
Triton is imported. Blocks are small, so that small inputs have many tiles.

Shape legend: T queries, S keys, P path keys, N query heads, K key/value heads, H head dim of q and k, W of v.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psrl.doctor import State, devices
from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout
from psrl.runtime.attention.triton import CachedPath, PathGrads, attend_path, backend, launch
from psrl.runtime.attention.triton.configs import BlockSizes, KernelConfig, kernel_config
from psrl.runtime.attention.triton.path import row_table
from tests.unit.test_attention import fan, random_forest

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMALL = KernelConfig(BlockSizes(16, 16, 4, 1), BlockSizes(16, 8, 4, 1), BlockSizes(8, 16, 4, 1), "ieee")


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    before, backend.kernel_config = backend.kernel_config, lambda *args: SMALL
    yield
    backend.kernel_config = before


def oracle(q, k, v, layout, grad):
    """Output, log-sum-exp [N, T], and the gradients of q, k and v, in float64."""
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    repeat = q.shape[1] // k.shape[1]
    query_T1 = torch.arange(len(q))[:, None]
    mask_TS = (torch.from_numpy(layout.first_S) <= query_T1) & (query_T1 < torch.from_numpy(layout.last_S))
    scores = torch.einsum("tnh,snh->nts", q, k.repeat_interleave(repeat, 1)) * q.shape[2] ** -0.5
    lse = scores.masked_fill(~mask_TS, float("-inf")).logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() * mask_TS
    out = torch.einsum("nts,snw->tnw", weights, v.repeat_interleave(repeat, 1))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def make_inputs(layout, num_kv_heads, group, head_dim, v_head_dim, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = layout.num_queries, layout.num_keys
    shapes = [
        (num_queries, num_kv_heads * group, head_dim),
        (num_keys, num_kv_heads, head_dim),
        (num_keys, num_kv_heads, v_head_dim),
        (num_queries, num_kv_heads * group, v_head_dim),
    ]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], grad


def run(inputs, grad, layout):
    out, lse = backend.attention_and_lse(*inputs, layout, inputs[0].shape[2] ** -0.5)
    return [out.detach(), lse, *torch.autograd.grad(out, inputs, grad)]


def assert_close(got, expected, grad):
    """Relative error by norms. In half precision a gradient much smaller than the output's, of a few tokens whose terms
    nearly cancel, keeps the rounding of its terms: it is measured against half the output gradient's norm."""
    dtype = grad.dtype
    floor = 1e-3 if dtype == torch.float32 else 0.5 * float(grad.double().norm())
    for name, actual, exact in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        if name == "lse":
            assert torch.equal(actual.isinf(), exact.isinf())
            actual, exact = actual.nan_to_num(neginf=0.0), exact.nan_to_num(neginf=0.0)
        assert actual.isfinite().all(), name
        error = float((actual.double() - exact).norm() / exact.norm().clamp_min(floor if name[0] == "d" else 1e-3))
        assert error <= TOLERANCE[dtype], (name, error)


def check(layout, num_kv_heads=1, group=2, head_dim=16, v_head_dim=16, dtype=torch.float32, seed=0):
    inputs, grad = make_inputs(layout, num_kv_heads, group, head_dim, v_head_dim, dtype, seed)
    got = run(inputs, grad, layout)
    assert_close(got, oracle(*inputs, layout, grad), grad)
    return got


def check_forest(data):
    rng = data.draw(st.randoms(use_true_random=False))
    num_path, num_tokens = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 28))
    layout = AttentionLayout.build(*map(np.array, random_forest(rng, num_path, num_tokens)), num_tokens)
    check(
        layout,
        num_kv_heads=data.draw(st.sampled_from([1, 2])),
        group=data.draw(st.sampled_from([1, 2])),
        head_dim=data.draw(st.sampled_from([16, 48])),
        v_head_dim=data.draw(st.sampled_from([16, 32])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=data.draw(st.integers(0, 1000)),
    )


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_forests(data):
    check_forest(data)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_200_random_forests(data):
    check_forest(data)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        (4, torch.float32),
        (8, torch.bfloat16),
        *(pytest.param(*case, marks=SLOW) for case in ((1, torch.float32), (8, torch.float32))),
        *(pytest.param(*case, marks=SLOW) for case in ((1, torch.bfloat16), (4, torch.bfloat16))),
    ],
)
def test_grouped_heads(group, dtype):
    num_tokens = 10 if group == 8 else 18
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(group), 5, num_tokens)), num_tokens)
    check(layout, num_kv_heads=1 if group == 8 else 2, group=group, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(dims, dtype):
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(dims[0]), 7, 18)), 18)
    check(layout, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)], ids=str)
@pytest.mark.parametrize(
    ("first", "last", "num_queries"),
    [
        ([0], [1], 1),  # one token, no path
        ([0] * 9 + [0], [1] * 9 + [1], 1),  # one token, a path
        ([0] * 20, [3] * 20, 3),  # path only
        (*fan(3, [1] * 20), 23),  # a wide fan
        (np.arange(64), np.full(64, 64), 64),  # a chain
        ([0, 3, 3, 4, 2], [2, 3, 5, 5, 2], 5),  # a query and two keys that see nothing
        ([], [], 3),  # no key
    ],
    ids=["token", "token_and_path", "path", "fan", "chain", "blind", "no_keys"],
)
def test_degenerate_shapes(first, last, num_queries, dtype):
    layout = AttentionLayout.build(np.array(first, np.int64), np.array(last, np.int64), num_queries)
    out, _, dq, dk, _ = check(layout, dtype=dtype)
    if layout.is_constant:
        assert not dq.any() and not dk.any()
    if num_queries == 5:
        assert not out[2].any() and not dq[2].any() and not dk[[1, 4]].any()


def test_no_queries():
    layout = AttentionLayout.build(np.zeros(4, np.int64), np.zeros(4, np.int64), 0)
    out, _, dq, dk, dv = check(layout)
    assert out.shape == dq.shape == (0, 2, 16) and not dk.any() and not dv.any()


def test_strided_inputs_and_the_public_function():
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(1), 6, 20)), 20)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(20, 6, 16, generator=generator)[:, :2].requires_grad_()
    k = torch.randn(1, 26, 16, generator=generator).transpose(0, 1).requires_grad_()
    v = torch.randn(26, 16, 1, generator=generator).transpose(1, 2).requires_grad_()
    grad = torch.ones(()).expand(20, 2, 16)
    out = attend_layout(q, k, v, layout, backend="triton")
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    expected = oracle(q, k, v, layout, grad)
    for actual, exact in zip(got, [expected[0], *expected[2:]], strict=True):
        assert float((actual - exact).norm() / exact.norm()) < 1e-5


def cached(pair, lens, num_layers, layer):
    """Blocks [layers, n, K, H] of which one layer holds ``pair``; the others hold what must not be read."""
    blocks = []
    for x in pair:
        parts = torch.full((num_layers, len(x), *x.shape[1:]), float("nan"), dtype=x.dtype)
        parts[layer] = x.detach()
        blocks.append([part.contiguous() for part in parts.split(lens, dim=1)])
    return blocks


@pytest.mark.parametrize(
    ("is_split", "dtype"),
    [
        pytest.param(False, torch.bfloat16, id="whole-bfloat16"),
        pytest.param(True, torch.float32, id="split_in_pages-float32"),
        pytest.param(False, torch.float32, id="whole-float32", marks=SLOW),
        pytest.param(True, torch.bfloat16, id="split_in_pages-bfloat16", marks=SLOW),
    ],
)
def test_cached_path_in_blocks(is_split, dtype, monkeypatch):
    """Bit-equal to dense keys; gradients are added to the accumulators of one layer, and nothing else changes."""
    if is_split:
        monkeypatch.setattr(launch, "MIN_TILES", 1)
        monkeypatch.setattr(launch, "CPU_PROGRAMS", 64)
    lens, num_local, layer = [1, 9, 13], 20, 1
    num_path = sum(lens)
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(5), num_path, num_local)), num_local)
    inputs, grad = make_inputs(layout, 2, 2, 48, 16, dtype, 3)
    dense = run(inputs, grad, layout)
    slots = [work.num_slots for key, work in layout.derived.items() if key[0] == "triton_work"]
    assert len(slots) == 3 and all(slots) == is_split

    q, k, v = (x.detach() for x in inputs)
    blocks = cached((k[:num_path], v[:num_path]), lens, 3, layer)
    sizes = None
    if is_split:  # blocks have the room of pages of 16 tokens
        blocks = [[torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -n % 16), value=float("nan"))
                   for x, n in zip(part, lens, strict=True)] for part in blocks]  # fmt: skip
        sizes = lens
    path = CachedPath.build(*blocks, sizes)
    totals = [[torch.full(x.shape, 0.5) for x in part] for part in blocks]
    local = [x.clone().requires_grad_() for x in (q, k[num_path:], v[num_path:])]
    out = attend_path(*local, layout, path, layer, lambda: PathGrads.build(*totals, sizes))
    assert torch.equal(out, dense[0])
    dq, dk, dv = torch.autograd.grad(out, local, grad)
    assert torch.equal(dq, dense[2]) and torch.equal(dk, dense[3][num_path:]) and torch.equal(dv, dense[4][num_path:])

    expected = oracle(*inputs, layout, grad)
    for parts, exact in zip(totals, expected[3:], strict=True):
        assert all(bool((x[:, n:] == 0.5).all()) for x, n in zip(parts, lens, strict=True))
        whole = torch.cat([x[:, :n] for x, n in zip(parts, lens, strict=True)], dim=1)
        assert bool((whole[[0, 2]] == 0.5).all())
        error = float((whole[layer] - 0.5 - exact[:num_path]).norm() / exact[:num_path].norm())
        assert error <= TOLERANCE[dtype]


def test_split_rows_match_the_oracle_and_runs_are_bit_equal(monkeypatch):
    monkeypatch.setattr(launch, "MIN_TILES", 1)
    monkeypatch.setattr(launch, "CPU_PROGRAMS", 64)
    # Few queries against a long path, and a root that many queries see.
    first, last = fan(4, [2] * 20)
    layout = AttentionLayout.build(np.r_[[0] * 50, first], np.r_[[44] * 50, last], 44)
    runs = [check(layout), check(layout)]
    assert all(work.num_slots for key, work in layout.derived.items() if key[0] == "triton_work")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_path_that_does_not_fit_is_refused():
    layout = AttentionLayout.build(np.zeros(5, np.int64), np.full(5, 2), 2)
    q, k, v = torch.zeros(2, 2, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)
    blocks = [torch.zeros(1, 4, 1, 16)]
    with pytest.raises(UnsupportedError, match=r"1 heads of 16 in torch.float32 do not fit local keys of 2 heads"):
        attend_path(q, k, v, layout, CachedPath.build(blocks, blocks), 0, None)
    blocks = [torch.zeros(1, 3, 2, 16)]
    with pytest.raises(ValueError, match=r"2 queries and 5 keys, got 2 and 3 \+ 1"):
        attend_path(q, k, v, layout, CachedPath.build(blocks, blocks), 0, None)
    for bad, message in (
        ([], "at least one block"),
        ([torch.zeros(1, 3, 2, 16), torch.zeros(1, 3, 1, 16)], "must be .* of one kind"),
        ([torch.zeros(1, 3, 16, 2).transpose(2, 3)], "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            row_table(bad)
    with pytest.raises(ValueError, match=r"a path has \[4\] tokens in blocks of \[3\]"):
        row_table([torch.zeros(1, 3, 2, 16)], [4])
    with pytest.raises(UnsupportedError, match=r"add to float32 accumulators, got torch\.bfloat16"):
        PathGrads.build(blocks, [x.bfloat16() for x in blocks])


def doctors_finding(monkeypatch):
    monkeypatch.setattr(backend, "kernel_config", kernel_config)
    monkeypatch.setattr(devices, "ATTENTION_BACKENDS", ("triton",))
    (finding,) = devices.check_backends()
    return finding


def test_the_doctor_tries_the_path_in_place(monkeypatch):
    finding = doctors_finding(monkeypatch)
    assert finding.state is State.OK and finding.detail.endswith("; path in place")


@pytest.mark.slow
def test_the_doctor_finds_gradients_in_another_accumulator(monkeypatch):
    monkeypatch.setattr(PathGrads, "build", lambda dk, dv: PathGrads(row_table(dk), row_table(dk)))
    assert doctors_finding(monkeypatch).state is State.WRONG


def test_visited_tiles_are_counted():
    """One tile of the interpreter is one trip of the kernels' loop: the loops visit exactly the listed tiles."""
    layout = AttentionLayout.build(*map(np.array, random_forest(random.Random(9), 20, 30)), 30)
    queries = np.arange(30)[:, None]
    visible = (layout.first_S <= queries) & (queries < layout.last_S)
    for blocks in (SMALL.forward, SMALL.dq, SMALL.dkv):
        rows, columns = -(-30 // blocks.queries), -(-50 // blocks.keys)
        padded = np.zeros((rows * blocks.queries, columns * blocks.keys), bool)
        padded[:30, :50] = visible
        num_visible = int(padded.reshape(rows, blocks.queries, columns, blocks.keys).any((1, 3)).sum())
        tiles = launch.block_tiles(layout, blocks)
        assert tiles.by_query.num_tiles == tiles.by_key.num_tiles == num_visible < rows * columns
