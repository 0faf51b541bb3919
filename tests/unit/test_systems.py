"""Plans of comparison systems: literal small cases, and every invariant on random forests."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psrl.analyze.measures import tree_packing
from psrl.analyze.radix import TreeShape
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import ConfigError
from psrl.plan_check import check_plan
from psrl.plan_view.timeline import make_timeline
from psrl.planner import build_plan
from psrl.systems import SYSTEMS, find_system
from psrl.types import SampleBatch, Span
from tests.helpers.streams import tree_of
from tests.unit.test_analyze import streams_of
from tests.unit.test_planner import forests

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10, grad_bytes_per_token=20)


def plan_of(name, batch, max_tokens, forward_only=False):
    """The plan, checked against the samples as the system sees them."""
    system = find_system(name)
    prepared = system.prepare(batch, max_tokens)
    plan = build_plan(
        prepared, max_tokens=max_tokens, shape=SHAPE, footprint=FOOTPRINT, forward_only=forward_only, system=system
    )
    check_plan(plan, prepared, FOOTPRINT)
    return plan


def chain(num_samples, num_tokens):
    """Samples that share their first ``num_tokens`` tokens and part in the last two."""
    rows = [[*range(num_tokens), 1000 + s, 2000 + s] for s in range(num_samples)]
    return SampleBatch.from_lists(rows, [[0] * num_tokens + [1, 1]] * num_samples)


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=25, deadline=None)
@example(
    SampleBatch.from_lists([[0] * 12, [0] * 4, [0, 0, 0, 1, *[0] * 9]], [[0] * 12, [0] * 4, [0] * 13]), 8, False
)  # a run that is no spine, however long, lies between two that are
@given(forests(), st.sampled_from([1, 3, 8, 20, 1000]), st.booleans())
def test_every_plan_keeps_its_invariants(name, batch, max_tokens, forward_only):
    plan = plan_of(name, batch, max_tokens, forward_only)
    timeline = make_timeline(plan, SHAPE, FOOTPRINT)
    assert timeline.peak_bytes == plan.stats.kv_bytes_peak
    last = timeline.executions[-1]
    assert (last.kv_bytes_after, last.grad_bytes_after) == (0, 0)


def test_unknown_system():
    with pytest.raises(ConfigError, match=r"the sharing system must be one of psrl, tree_packing, .* got 'vllm'"):
        find_system("vllm")


# 29 shared tokens and three samples of two own: 35 unique tokens. psrl at 16: a token is spine if more than 16 tokens
# hang below it, so the first 19 are (29 - 19 + 6 = 16).
def test_psrl():
    plan = plan_of("psrl", chain(3, 29), 16)
    assert (plan.stats.unique_tokens, plan.stats.spine_tokens, plan.stats.num_micro_batches) == (35, 19, 3)
    assert plan.stats.kv_bytes_peak == 19 * (10 + 20)


def test_tree_packing_computes_the_prefix_in_every_micro_batch():
    plan = plan_of("tree_packing", chain(3, 29), 33)
    assert sorted(mb.num_tokens for mb in plan.micro_batches) == [31, 33]
    assert (plan.stats.unique_tokens, plan.stats.spine_tokens, plan.stats.kv_bytes_peak) == (64, 0, 0)
    assert plan.blocks == () and plan.max_tokens == 33


def test_tree_packing_gives_a_sample_that_is_longer_than_the_budget_a_micro_batch():
    plan = plan_of("tree_packing", chain(3, 29), 16)
    assert [mb.num_tokens for mb in plan.micro_batches] == [31, 31, 31]
    assert plan.max_tokens == 31


def test_pages_are_shared_only_whole():
    """The second page of each sample is its own: 16 + 3 x 15 tokens, 4 pages. It is kept, and takes 16 tokens."""
    plan = plan_of("paged", chain(3, 29), 16)
    assert plan.stats.unique_tokens == 16 + 3 * 15
    assert [block.num_tokens for block in plan.blocks] == [16, 15, 15, 15]
    assert plan.stats.kv_bytes_peak == 4 * 16 * 10 + 16 * 20
    assert [e.kv_bytes for e in make_timeline(plan, SHAPE, FOOTPRINT).executions] == [160, 320, 480, 640, 640]


def test_pages_without_keeping():
    plan = plan_of("no_adaptive_blocks", chain(3, 29), 16)
    assert plan.blocks[0].span == Span(0, 16) and len(plan.blocks) == 1
    assert plan.stats.kv_bytes_peak == 16 * (10 + 20)


def test_radix_keeps_every_token():
    plan = plan_of("radix", chain(3, 29), 16)
    assert plan.stats.unique_tokens == 35
    assert [e.kv_bytes for e in make_timeline(plan, SHAPE, FOOTPRINT).executions][-1] == 350
    assert plan.stats.kv_bytes_peak == 350 + 19 * 20


def test_without_dynamic_caching_blocks_stay():
    """Two trunks of 20 tokens, 14 of each spine: both are still there when the last micro-batch runs."""
    rows = [[*range(base, base + 20), 500 + base + s, 600 + base + s] for base in (0, 100) for s in range(2)]
    batch = SampleBatch.from_lists(rows, [[0] * 20 + [1, 1]] * 4)
    peaks = {name: plan_of(name, batch, 10).stats for name in ("psrl", "no_dynamic_cache")}
    last = make_timeline(plan_of("no_dynamic_cache", batch, 10), SHAPE, FOOTPRINT).executions[-1]
    assert last.kv_bytes == peaks["psrl"].spine_tokens * 10 == 280
    assert peaks["no_dynamic_cache"].kv_bytes_peak >= peaks["psrl"].kv_bytes_peak


def test_without_self_sharing_runs_stay_whole():
    """The 29 tokens that all three samples have are one micro-batch, although 16 is the budget."""
    plan = plan_of("no_self_sharing", chain(3, 29), 16)
    assert [mb.num_tokens for mb in plan.micro_batches] == [29, 6]
    assert (plan.stats.spine_tokens, plan.max_tokens) == (29, 29)


def test_without_token_wise_micro_batches_samples_are_counted():
    """Samples of 31 tokens under a budget of 64: two a micro-batch, whatever they add."""
    plan = plan_of("no_token_wise", chain(5, 29), 64)
    assert [mb.num_tokens for mb in plan.micro_batches] == [29, 4, 4, 2]


@pytest.mark.parametrize("max_tokens", [16, 33, 40])
def test_tree_packing_is_what_analyze_counts(max_tokens):
    """Two groups, the second in the first's tokens shifted by one."""
    rows = [[*range(g, g + 29), 1000 + s, 2000 + s] for g in (0, 1) for s in range(3)]
    batch = SampleBatch.from_lists(rows, [[0] * 29 + [1, 1]] * 6)
    counted = tree_packing(TreeShape.of(tree_of(*streams_of(batch))), batch.seqlens_S, max_tokens)
    plan = plan_of("tree_packing", batch, max_tokens)
    assert plan.stats.unique_tokens == counted.work.tokens == {16: 186, 33: 128, 40: 70}[max_tokens]
    assert plan.stats.num_micro_batches == counted.num_micro_batches
    assert plan.max_tokens == max(counted.largest, max_tokens)


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_samples_are_no_micro_batches(name):
    """As a data-parallel rank has them where there are fewer rows than ranks."""
    plan = plan_of(name, SampleBatch.from_lists([], []), 8)
    assert plan.micro_batches == () and plan.stats.kv_bytes_peak == 0
