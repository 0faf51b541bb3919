"""Prefixes that are computed again because the cache's budget holds them in no other way."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import ConfigError, MemoryBudgetError, PlanError
from psrl.plan_check import check_plan
from psrl.systems import find_system
from psrl.tiers import HostTier
from psrl.tree import build_tree, tree_of
from psrl.types import SampleBatch
from tests.unit.test_planner import FOOTPRINT, forests, plan_of

SIBLINGS = SampleBatch.from_lists([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 10]], [[0] * 6 + [1, 1]] * 2)
"""Ten distinct tokens. In micro-batches of eight, the first two are spine: 20 bytes of K/V and 40 of gradients."""


def with_budget(budget):
    return dataclasses.replace(FOOTPRINT, budget_bytes=budget)


def test_what_the_budget_holds_is_still_shared():
    plan = plan_of(SIBLINGS, 8, footprint=with_budget(59), recompute=True)
    assert (plan.stats.unique_tokens, plan.stats.recomputed_tokens, plan.stats.spine_tokens) == (15, 5, 1)
    assert plan.stats.kv_bytes_peak == 30
    assert [plan.token_ids_U[mb.tokens_T].tolist() for mb in plan.micro_batches] == [
        [1], [2, 3, 4, 5, 6, 9, 10], [2, 3, 4, 5, 6, 7, 8]
    ]  # fmt: skip
    assert plan.index_N[:8].tolist()[0] == plan.index_N[8] == 0
    assert set(plan.index_N[1:8].tolist()).isdisjoint(plan.index_N[9:].tolist())
    check_plan(plan, SIBLINGS, with_budget(59))
    without_cache = plan_of(SIBLINGS, 8, footprint=with_budget(1), recompute=True)
    assert (without_cache.stats.recomputed_tokens, without_cache.stats.kv_bytes_peak) == (6, 0)


def test_nothing_is_computed_again_where_the_budget_suffices():
    plan = plan_of(SIBLINGS, 8, footprint=with_budget(60), recompute=True)
    assert (plan.stats.unique_tokens, plan.stats.recomputed_tokens, plan.stats.kv_bytes_peak) == (10, 0, 60)


def test_it_is_an_error_without_leave_or_where_a_sample_needs_the_cache():
    with pytest.raises(MemoryBudgetError, match=r"sample 0 \(8 tokens\) needs 60 bytes .*kv_cache_bytes allows 59"):
        plan_of(SIBLINGS, 8, footprint=with_budget(59))
    with pytest.raises(MemoryBudgetError, match="allows 29"):
        plan_of(SIBLINGS, 7, footprint=with_budget(29), recompute=True)
    assert plan_of(SIBLINGS, 7, footprint=with_budget(30), recompute=True).stats.recomputed_tokens == 5
    with pytest.raises(ConfigError, match=r"psrl\.kv_recompute.* system radix"):
        plan_of(SIBLINGS, 8, system=find_system("radix"), recompute=True)


@pytest.mark.parametrize("flops_per_byte, copies", [(1e-3, 0), (1e9, 6)])
def test_the_cheaper_of_host_and_recompute_is_taken(flops_per_byte, copies):
    """Two layers, so one layer of the path takes half: 30 bytes fit where 60 do not."""
    host = HostTier(1000, num_layers=2, flops_per_byte=flops_per_byte)
    plan = plan_of(SIBLINGS, 8, footprint=with_budget(30), host=host, recompute=True)
    assert (plan.tiers is None) == (copies > 0)
    assert plan.stats.recomputed_tokens == max(0, copies - 1)
    check_plan(plan, SIBLINGS, with_budget(30), host)
    too_little = HostTier(1, num_layers=2, flops_per_byte=flops_per_byte)
    assert plan_of(SIBLINGS, 8, footprint=with_budget(30), host=too_little, recompute=True).stats.recomputed_tokens == 5


def test_copies_are_counted():
    plan = plan_of(SIBLINGS, 8, footprint=with_budget(59), recompute=True)
    for copies in (0, 4):
        wrong = dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, recomputed_tokens=copies))
        with pytest.raises(PlanError, match=rf"15 unique tokens for 10 prefixes and {copies} copies"):
            check_plan(wrong, SIBLINGS)
    moved = plan.index_N.copy()
    moved[1] = plan.index_N[9]
    with pytest.raises(PlanError, match="the last token of sample 0 does not see the sample"):
        check_plan(dataclasses.replace(plan, index_N=moved), SIBLINGS)


@settings(max_examples=300, deadline=None)
@given(forests(), st.integers(0, 4), st.integers(1, 400), st.booleans())
def test_samples_within_max_tokens_fit_any_budget(batch, slack, budget, forward_only):
    longest = int(batch.seqlens_S.max())
    plan = plan_of(batch, longest + slack, footprint=with_budget(budget), forward_only=forward_only, recompute=True)
    check_plan(plan, batch, with_budget(budget))
    distinct = build_tree(batch).num_tokens
    assert distinct + plan.stats.recomputed_tokens == plan.stats.unique_tokens <= batch.num_tokens
    tree = tree_of(plan, batch)
    for sample, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        last = int(plan.index_N[end - 1])
        assert tree.ancestors(last).tolist() == plan.index_N[start:end].tolist(), sample
        assert tree.depth_U[last] == end - start - 1 and tree.end_U[tree.ancestors(last)].min() > last


@settings(max_examples=100, deadline=None)
@given(forests(), st.sampled_from([1, 3, 1000]))
def test_the_tree_of_a_plan_is_that_of_its_samples(batch, max_tokens):
    ours, theirs = tree_of(plan_of(batch, max_tokens), batch), build_tree(batch)
    for field in dataclasses.fields(theirs):
        assert (getattr(ours, field.name) == getattr(theirs, field.name)).all(), field.name
