"""What attention makes in pass 1 is kept for pass 2: within the budget, bit by bit, and without a second forward."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from psrl.cost import KVFootprint, ModelShape
from psrl.errors import PlanError, UnsupportedError
from psrl.kept_attention import keep_attention
from psrl.plan_check import check_plan
from psrl.planner import build_plan
from psrl.runtime.attention import AttentionLayout, KeptAttention, KeptResult, attend_layout, flash, kernels
from psrl.simulate.work import shared_passes
from psrl.types import SampleBatch
from tests.unit.test_flash_attention import CpuVarlenKernel

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
CHAIN = SampleBatch.from_lists([range(1, 31)], [[0] + [1] * 29])
"""One sample of 30 tokens: with micro-batches of 10, two segments of spine and a leaf."""


def footprint(attention_bytes: int, budget: int | None = None, num_shards: int = 1) -> KVFootprint:
    return KVFootprint(10, 20, budget, num_shards, attention_bytes)


def plan_of(footprint, batch=CHAIN, **kwargs):
    plan = build_plan(batch, max_tokens=10, shape=SHAPE, footprint=footprint, **kwargs)
    check_plan(plan, batch, footprint)
    return plan


def test_an_update_keeps_attention_of_the_spine():
    plain, kept = plan_of(footprint(0)), plan_of(footprint(7))
    assert (plain.stats.spine_tokens, plain.stats.kv_bytes_peak, plain.stats.attention_bytes) == (20, 600, 0)
    assert (kept.stats.kv_bytes_peak, kept.stats.attention_bytes) == (600, 140)
    spine_pairs = 20 * 21 // 2
    assert plain.stats.flops_shared - kept.stats.flops_shared == spine_pairs * SHAPE.flops_per_pair == 210 * 64
    assert plan_of(footprint(7, num_shards=2)).stats.attention_bytes == 70


def test_a_plan_without_a_second_forward_keeps_nothing():
    assert plan_of(footprint(7), forward_only=True).stats.attention_bytes == 0
    whole = build_plan(CHAIN, max_tokens=30, shape=SHAPE, footprint=footprint(7))
    assert (whole.stats.spine_tokens, whole.stats.attention_bytes) == (0, 0)


def test_the_budget_decides_how_much_is_kept():
    """Of two segments of ten tokens, the second sees more: 155 pairs and 55."""
    whole = plan_of(footprint(7))
    assert plan_of(footprint(7, budget=740)).kept_attention == whole.kept_attention == {0, 1}
    for budget in (739, 670):
        one = plan_of(footprint(7, budget=budget))
        assert (one.kept_attention, one.stats.kv_bytes_peak, one.stats.attention_bytes) == ({1}, 600, 70)
        assert one.stats.flops_shared - whole.stats.flops_shared == 55 * SHAPE.flops_per_pair
    none = plan_of(footprint(7, budget=669))
    assert (none.kept_attention, none.stats.kv_bytes_peak, none.stats.attention_bytes) == (frozenset(), 600, 0)
    assert none.stats.flops_shared == plan_of(footprint(0)).stats.flops_shared


def test_a_plan_is_decided_anew_for_another_budget():
    """With what planning for that budget gives, to the last bit."""
    plans = [plan_of(footprint(7, budget=budget)) for budget in (None, 740, 700, 640)]
    for made in plans:
        for wanted, budget in zip(plans, (None, 740, 700, 640), strict=True):
            again = keep_attention(made, SHAPE, footprint(7, budget=budget))
            assert (again.kept_attention, again.stats) == (wanted.kept_attention, wanted.stats)
    forward = plan_of(footprint(7), forward_only=True)
    assert keep_attention(forward, SHAPE, footprint(7)) is forward


def test_a_small_segment_is_kept_where_a_larger_one_has_no_room():
    """Micro-batches of 8, 7 and 9 tokens, in the order of keys that a token sees."""
    leaves = [[*range(41, 45), *range(start, start + 8)] for start in (50, 60)]
    batch = SampleBatch.from_lists([range(1, 31), *leaves], [[0] + [1] * 29, *[[0] + [1] * 11] * 2])
    whole = plan_of(footprint(7), batch)
    assert [whole.micro_batches[m].num_tokens for m in sorted(whole.kept_attention)] == [9, 8, 7]
    peak = whole.stats.kv_bytes_peak
    for room, tokens in ((168, 24), (167, 15), (105, 15), (104, 8), (56, 8), (55, 7), (49, 7), (48, 0)):
        plan = plan_of(footprint(7, budget=peak + room), batch)
        assert plan.stats.attention_bytes == 7 * tokens


def test_waves_keep_nothing():
    two = SampleBatch.from_lists([range(1, 31), range(31, 61)], [[0] + [1] * 29] * 2)
    plan = plan_of(footprint(1, budget=700), two)
    assert (plan.stats.num_waves, plan.stats.attention_bytes) == (2, 0)


def test_the_checker_knows_the_bytes():
    plan = plan_of(footprint(7))
    for wrong in (1, 139, 141):
        stats = dataclasses.replace(plan.stats, attention_bytes=wrong)
        with pytest.raises(PlanError, match="attention"):
            check_plan(dataclasses.replace(plan, stats=stats), CHAIN, footprint(7))
    leaf = next(mb.index for mb in plan.micro_batches if not mb.is_spine)
    for kept in (frozenset({0}), frozenset({0, 1, leaf})):
        with pytest.raises(PlanError, match="attention"):
            check_plan(dataclasses.replace(plan, kept_attention=kept), CHAIN, footprint(7))
    with pytest.raises(PlanError, match="attention"):  # more than the budget
        check_plan(plan, CHAIN, footprint(7, budget=739))


class Kernel(kernels.CpuFlashKernel):
    """Counts its forwards."""

    def __init__(self):
        super().__init__()
        self.num_forwards = 0

    def forward(self, *args):
        self.num_forwards += 1
        return super().forward(*args)


def case(dtype):
    """Six path keys, a root of 10 tokens with children of 4, 3 and 3; inputs and an output gradient."""
    lengths = [10, 4, 3, 3]
    first = np.r_[[0] * 6, np.arange(20)]
    last = np.r_[[20] * 6, [20] * 10, np.repeat(np.cumsum(lengths)[1:], lengths[1:])]
    generator = torch.Generator().manual_seed(random.Random(3).randrange(1000))
    q, k, v, grad = (
        torch.randn(n, heads, 16, dtype=dtype, generator=generator) for n, heads in ((20, 4), (26, 2), (26, 2), (20, 4))
    )
    return AttentionLayout.build(first, last, 20), [x.requires_grad_() for x in (q, k, v)], grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pass_2_reads_what_pass_1_made(monkeypatch, dtype):
    kernel = Kernel()
    monkeypatch.setitem(kernels.KERNELS, "cpu", kernel)
    layout, inputs, grad = case(dtype)
    out = attend_layout(*inputs, layout, backend="sdpa")
    wanted = [out, *torch.autograd.grad(out, inputs, grad)]

    kept = KeptAttention()
    with torch.no_grad():
        attend_layout(*inputs, layout, backend="sdpa", place=KeptResult(kept, 3, 1, is_filled=False))
    assert kept.peak_bytes == 20 * 4 * (16 * dtype.itemsize + max(4, dtype.itemsize))
    before = kernel.num_forwards

    def attend(*inputs):
        return attend_layout(*inputs, layout, backend="sdpa", place=KeptResult(kept, 3, 1, is_filled=True))

    for run in (attend, lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False)):
        out = run(*inputs)
        found = [out, *torch.autograd.grad(out, inputs, grad)]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert kernel.num_forwards == before > 0
    kept.drop(3, 1)
    kept.check_drained()


def test_flash_reads_what_pass_1_made():
    layout, inputs, grad = case(torch.float32)
    kept, kernel = KeptAttention(), CpuVarlenKernel()
    runs = []
    for is_filled in (False, True):
        place = KeptResult(kept, 0, 0, is_filled)
        out = flash.varlen_attention(*inputs, layout, 0.25, kernel, place)
        runs.append([out, *torch.autograd.grad(out, inputs, grad), len(kernel.calls)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:4], runs[1][:4], strict=True))
    assert runs[0][4] == runs[1][4] > 0


def test_what_was_not_kept_is_an_error():
    layout, inputs, _ = case(torch.float32)
    kept = KeptAttention()
    with pytest.raises(PlanError, match="micro-batch 3, layer 1, was not kept"):
        attend_layout(*inputs, layout, backend="sdpa", place=KeptResult(kept, 3, 1, is_filled=True))
    with pytest.raises(UnsupportedError, match="'reference' cannot keep"):
        attend_layout(*inputs, layout, backend="reference", place=KeptResult(kept, 3, 1, is_filled=False))
    attend_layout(*inputs, layout, backend="sdpa", place=KeptResult(kept, 3, 1, is_filled=False))
    with pytest.raises(PlanError, match="micro-batch 3, layer 1, is kept already"):
        attend_layout(*inputs, layout, backend="sdpa", place=KeptResult(kept, 3, 1, is_filled=False))
    with pytest.raises(PlanError, match=r"\[\(3, 1\)\] is still kept"):
        kept.check_drained()
    kept.close()
    kept.check_drained()


def test_the_simulator_computes_no_attention_in_the_forward_of_what_is_kept():
    for footprint_, kept in (
        (footprint(0), [False, False]), (footprint(7), [True, True]), (footprint(7, budget=700), [True, False])
    ):  # fmt: skip
        forward, training = shared_passes(plan_of(footprint_))
        assert [amounts.is_kept for amounts in forward.micro_batches] == [False, False]
        # The leaf, then the two segments of the spine, of the last 10 and the first 10 tokens.
        assert [amounts.is_kept for amounts in training.micro_batches] == [False, *kept]
        assert [amounts.pairs for amounts in training.micro_batches] == [255, 155, 55]
        computed = [255, *(0 if is_kept else pairs for is_kept, pairs in zip(kept, (155, 55), strict=True))]
        assert [amounts.in_forward.pairs for amounts in training.micro_batches] == computed
