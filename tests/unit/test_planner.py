"""Plans: literal small cases, and every invariant on random forests."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.cost import KVFootprint, ModelShape
from psrl.errors import ConfigError, InputError, MemoryBudgetError, PlanError
from psrl.plan_check import check_plan
from psrl.planner import build_plan
from psrl.types import SampleBatch, Span, Wave

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10, grad_bytes_per_token=20)


def plan_of(batch, max_tokens, **kwargs):
    kwargs.setdefault("footprint", FOOTPRINT)
    return build_plan(batch, max_tokens=max_tokens, shape=SHAPE, **kwargs)


@st.composite
def forests(draw):
    """Samples that share prefixes with earlier ones, extend them, repeat them, or stand alone."""
    vocab = draw(st.integers(2, 5))
    rows, masks = [], []
    for _ in range(draw(st.integers(1, 8))):
        kept = rows[draw(st.integers(0, len(rows) - 1))] if rows and draw(st.booleans()) else []
        kept = kept[: draw(st.integers(0, len(kept)))]
        row = [*kept, *draw(st.lists(st.integers(0, vocab), min_size=0 if kept else 1, max_size=12))]
        rows.append(row)
        masks.append([0, *draw(st.lists(st.integers(0, 1), min_size=len(row) - 1, max_size=len(row) - 1))])
    temperatures = draw(st.lists(st.sampled_from([1.0, 0.7]), min_size=len(rows), max_size=len(rows)))
    return SampleBatch.from_lists(rows, masks, temperatures=temperatures)


@settings(max_examples=300, deadline=None)
@given(forests(), st.sampled_from([1, 2, 3, 5, 8, 1000]), st.booleans())
def test_every_plan_keeps_its_invariants(batch, max_tokens, forward_only):
    plan = plan_of(batch, max_tokens, forward_only=forward_only)
    check_plan(plan, batch, FOOTPRINT)
    if max_tokens == 1000:
        assert plan.stats.spine_tokens == 0 and len(plan.micro_batches) == 1


@settings(max_examples=150, deadline=None)
@given(forests(), st.sampled_from([1, 2, 3, 5]), st.sampled_from([0.3, 0.6, 0.9]))
def test_waves_respect_the_budget(batch, max_tokens, share):
    peak = plan_of(batch, max_tokens).stats.kv_bytes_peak
    budget = max(1, int(peak * share))
    footprint = dataclasses.replace(FOOTPRINT, budget_bytes=budget)
    deepest = int(batch.seqlens_S.max()) * (FOOTPRINT.kv_bytes_per_token + FOOTPRINT.grad_bytes_per_token)
    try:
        plan = plan_of(batch, max_tokens, footprint=footprint)
    except MemoryBudgetError:
        assert budget < deepest  # one root path always suffices
        return
    check_plan(plan, batch, footprint)
    assert plan.stats.kv_bytes_peak <= budget
    assert plan.stats.num_waves == len(plan.waves)


def test_a_fork_inside_the_spine():
    """Ten tokens and a branch after the sixth, budget 4: six spine tokens in two segments, two leaves."""
    batch = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
    plan = plan_of(batch, 4)
    assert plan.stats.unique_tokens == 11 and plan.stats.spine_tokens == 6
    spine = [mb.tokens_T.tolist() for mb in plan.micro_batches if mb.is_spine]
    assert sorted(t for tokens in spine for t in tokens) == [0, 1, 2, 3, 4, 5] and len(spine) == 2
    leaves = sorted(plan.token_ids_U[mb.tokens_T].tolist() for mb in plan.micro_batches if not mb.is_spine)
    assert leaves == [[7, 8, 9, 10], [11]]
    assert plan.waves == (Wave((0, 1), (2, 3, 1, 0)),)
    assert [b.span for b in plan.blocks] == [Span(0, len(spine[0])), Span(len(spine[0]), 6)]
    assert [b.ref_count for b in plan.blocks] == [4, 2]  # segment 1 twice and two leaves; two leaves


def test_subtrees_at_different_depths_share_a_micro_batch():
    """Leaves on one root path are packed together: the deeper first, so that a leading run sees each path key."""
    batch = SampleBatch.from_lists([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 8]], [[0] * 6, [0] * 5, [0] * 3])
    plan = plan_of(batch, 3)
    leaves = {tuple(plan.token_ids_U[mb.tokens_T].tolist()): mb for mb in plan.micro_batches if not mb.is_spine}
    assert set(leaves) == {(5, 6), (7, 8)}
    leaf = leaves[7, 8]
    assert leaf.path_len == 4  # 7 sees tokens 1, 2, 3, 4; 8 sees 1 and 2
    assert leaf.first_S.tolist() == [0, 0, 0, 0, 0, 1] and leaf.last_S.tolist() == [2, 2, 1, 1, 1, 2]


def test_one_row_serves_several_labels():
    batch = SampleBatch.from_lists([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [[0, 1, 1]] * 3)
    plan = plan_of(batch, 100)
    (mb,) = plan.micro_batches
    assert plan.edges.num_edges == 4 and len(mb.rows_R) == 2
    assert plan.edges.label_E.tolist() == [2, 3, 4, 5] and mb.edge_rows_E.tolist() == [0, 1, 1, 1]
    assert plan.edges.target_edges_M.tolist() == [0, 1, 0, 2, 0, 3]


def test_temperatures_share_states_but_not_rows():
    batch = SampleBatch.from_lists([[1, 2], [1, 2]], [[0, 1]] * 2, temperatures=[1.0, 0.5])
    plan = plan_of(batch, 100)
    assert plan.stats.unique_tokens == 2
    assert plan.micro_batches[0].row_temperature_R.tolist() == [0.5, 1.0]


def test_light_groups_are_packed_evenly():
    """Six independent samples of four tokens, budget 12: two micro-batches of equal cost."""
    rows = [[10 * i + j for j in range(4)] for i in range(6)]
    plan = plan_of(SampleBatch.from_lists(rows, [[0, 1, 1, 1]] * 6), 12)
    assert [mb.num_tokens for mb in plan.micro_batches] == [12, 12]
    assert plan.micro_batches[0].cost == plan.micro_batches[1].cost


def test_spine_segments_are_even():
    """A chain of 110 tokens, budget 20: five spine segments by cost, none above the budget."""
    plan = plan_of(SampleBatch.from_lists([range(110)], [[0] + [1] * 109]), 20)
    sizes = [mb.num_tokens for mb in plan.micro_batches if mb.is_spine]
    assert sum(sizes) == 90 and len(sizes) == 5 and max(sizes) <= 20 and min(sizes) >= 14


def test_flops_of_an_unshared_batch():
    """One sample, one micro-batch: the ideal speed-up is what fewer logit rows save."""
    plan = plan_of(SampleBatch.from_lists([[1, 2, 3, 4]], [[0, 0, 0, 1]]), 10)
    per_row = 3 * SHAPE.flops_per_row
    assert plan.stats.flops_unshared - plan.stats.flops_shared == pytest.approx(3 * per_row)


def test_more_waves_as_the_budget_shrinks():
    """A binary tree four levels deep: waves split at branches and keep only the open root path."""
    rows = [[1] * 6 + [2 + b // 8] * 6 + [4 + b // 4] * 6 + [8 + b // 2] * 6 + [16 + b] * 6 for b in range(16)]
    batch = SampleBatch.from_lists(rows, [[0] + [1] * 29] * 16)
    whole = plan_of(batch, 7).stats.kv_bytes_peak
    waves = []
    for budget in (whole, whole * 3 // 4, 24 * (10 + 20)):  # at last: K/V and accumulators of one root path
        footprint = dataclasses.replace(FOOTPRINT, budget_bytes=budget)
        plan = plan_of(batch, 7, footprint=footprint)
        check_plan(plan, batch, footprint)
        waves.append(plan.stats.num_waves)
    assert waves[0] == 1 < waves[1] < waves[2]


@pytest.mark.parametrize("forward_only", [False, True])
def test_no_samples_are_no_micro_batches(forward_only):
    batch = SampleBatch.from_lists([], [])
    plan = plan_of(batch, 5, forward_only=forward_only)
    check_plan(plan, batch, FOOTPRINT)
    assert plan.micro_batches == () and plan.waves == (Wave((), ()),)
    assert plan.stats.kv_bytes_peak == 0 and plan.stats.prefix_match_rate == 0.0


def test_errors_name_the_way_out():
    batch = SampleBatch.from_lists([range(40)], [[0] + [1] * 39])
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got 0"):
        plan_of(batch, 0)
    with pytest.raises(MemoryBudgetError, match=r"sample 0 \(40 tokens\) needs .* psrl.kv_cache_bytes allows 5"):
        plan_of(batch, 4, footprint=dataclasses.replace(FOOTPRINT, budget_bytes=5))
    with pytest.raises(InputError, match="sample 1 has no tokens"):
        plan_of(SampleBatch.from_lists([[1], []], [[0], []]), 4)
    with pytest.raises(InputError, match="sample 0: its first token is a target"):
        plan_of(SampleBatch.from_lists([[1, 2]], [[1, 1]]), 4)


def test_the_checker_sees_a_broken_plan():
    """Each tampering is noticed: the checker is no rubber stamp."""
    batch = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
    plan = plan_of(batch, 4)
    check_plan(plan, batch, FOOTPRINT)
    first = plan.micro_batches[0]

    def with_first(**changes):
        return dataclasses.replace(plan, micro_batches=(dataclasses.replace(first, **changes), *plan.micro_batches[1:]))

    broken = [
        with_first(last_S=first.last_S - 1),
        with_first(tokens_T=first.tokens_T[::-1].copy()),
        with_first(completes=np.asarray([0])),
        dataclasses.replace(plan, waves=(Wave((0, 1), (1, 2, 3, 0)),)),
        dataclasses.replace(plan, waves=(Wave((1, 0), (2, 3, 1, 0)),)),
        dataclasses.replace(plan, waves=(Wave((0, 1), (2, 1, 0)),)),
        dataclasses.replace(plan, blocks=(plan.blocks[0]._replace(ref_count=3), plan.blocks[1])),
        dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, kv_bytes_peak=1)),
    ]
    for tampered in broken:
        with pytest.raises(PlanError):
            check_plan(tampered, batch, FOOTPRINT)
