"""Workloads made by hypothesis, through planner, cache simulators and plan checker."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.analyze.shapes import load_shape
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import ConfigError, MemoryBudgetError
from psrl.plan_check import check_plan
from psrl.plan_view.policies import adaptive, paged, radix
from psrl.plan_view.timeline import make_timeline
from psrl.planner import build_plan
from psrl.tree import build_tree, tree_of
from psrl.types import SampleBatch
from tests.helpers.traces import recorded_batch

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10, grad_bytes_per_token=20)
STRATEGIES = ("linear", "step", "step_window", "step_no_think", "tree")


@st.composite
def workloads(draw):
    """Agents' samples: prompts, trials, turns with thoughts, responses and observations, by sampling strategy."""
    strategy = draw(st.sampled_from(STRATEGIES))
    vocab = draw(st.sampled_from([2, 5, 50]))
    tokens = st.integers(0, vocab)
    rows: list[list[int]] = []
    masks: list[list[int]] = []
    system = draw(st.lists(tokens, min_size=1, max_size=8))

    def keep(ids: list[int], mask: list[int]) -> None:
        rows.append(ids)
        masks.append(mask)

    def turn() -> tuple[list[int], list[int], list[int]]:
        return tuple(draw(st.lists(tokens, min_size=low, max_size=high)) for low, high in ((0, 4), (1, 6), (0, 5)))

    def trajectory(prompt: list[int]) -> None:
        history, mask = list(prompt), [0] * len(prompt)
        turns: list[list[int]] = []
        for _ in range(draw(st.integers(1, 5))):
            thought, response, observation = turn()
            context = history
            if strategy == "step_window":
                context = [*prompt, *(t for part in turns[-2:] for t in part)]
            if strategy != "linear":
                said = [*thought, *response]
                keep([*context, *said], [0] * len(context) + [1] * len(said))
            kept = response if strategy == "step_no_think" else [*thought, *response]
            history = [*history, *kept, *observation]
            mask = [*mask, *([1] * len(kept)), *([0] * len(observation))]
            turns.append([*kept, *observation])
        if strategy == "linear":
            keep(history, mask)

    def grow(ids: list[int], mask: list[int], left: int) -> None:
        if not left:
            keep(ids, mask)
            return
        for _ in range(draw(st.integers(1, 3))):
            thought, response, observation = turn()
            said = [*thought, *response]
            grow([*ids, *said, *observation], [*mask, *([1] * len(said)), *([0] * len(observation))], left - 1)

    for _ in range(draw(st.integers(1, 2))):
        prompt = [*system, *draw(st.lists(tokens, max_size=6))]
        if strategy == "tree":
            grow(prompt, [0] * len(prompt), draw(st.integers(1, 3)))
        else:
            for _ in range(draw(st.integers(1, 2))):
                trajectory(prompt)
    temperatures = draw(st.lists(st.sampled_from([1.0, 1.0, 0.7]), min_size=len(rows), max_size=len(rows)))
    return SampleBatch.from_lists(rows, masks, temperatures=temperatures)


CASES = (workloads(), st.sampled_from([1, 3, 7, 16, 40, 1000]), st.booleans(), st.sampled_from([None, 0.4, 0.7, 0.95]))


@settings(max_examples=60, deadline=None)
@given(*CASES)
def test_workloads(batch, max_tokens, forward_only, share):
    check_workload(batch, max_tokens, forward_only, share)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(*CASES)
def test_a_thousand_workloads(batch, max_tokens, forward_only, share):
    check_workload(batch, max_tokens, forward_only, share)


def check_workload(batch, max_tokens, forward_only, share):
    """No plan violates an invariant, and every cache simulator agrees with the plan's bytes."""

    def plan_with(footprint):
        return build_plan(
            batch, max_tokens=max_tokens, shape=SHAPE, footprint=footprint, forward_only=forward_only, recompute=True
        )

    footprint, plan = FOOTPRINT, plan_with(FOOTPRINT)
    if share is not None:
        limited = dataclasses.replace(FOOTPRINT, budget_bytes=max(1, int(share * plan.stats.kv_bytes_peak)))
        try:
            footprint, plan = limited, plan_with(limited)
        except MemoryBudgetError:
            footprint = FOOTPRINT  # a sample is longer than a micro-batch: test_recompute.py, test_planner.py
    check_plan(plan, batch, footprint)
    timeline = make_timeline(plan, SHAPE, footprint)
    own = adaptive(timeline)
    assert own.peak == timeline.peak_bytes == plan.stats.kv_bytes_peak
    assert footprint.budget_bytes is None or own.peak <= footprint.budget_bytes
    last = timeline.executions[-1]
    assert (last.kv_bytes_after, last.grad_bytes_after) == (0, 0)
    assert timeline.flops == pytest.approx(plan.stats.flops_shared)

    tree = tree_of(plan, batch)
    pages, tokens = paged(plan, timeline, batch, tree, footprint), radix(plan, timeline, footprint)
    assert tokens.kv_peak == 10 * plan.stats.unique_tokens and tokens.recomputed_tokens == 0
    assert pages.kv_peak >= tokens.kv_peak >= own.kv_peak
    assert (pages.kv_bytes >= own.kv_bytes).all() and (tokens.kv_bytes >= own.kv_bytes).all()
    assert paged(plan, timeline, batch, tree, footprint, page_tokens=1).kv_peak == 10 * plan.stats.unique_tokens
    capacity = 10 * (max(mb.path_len + mb.num_tokens for mb in plan.micro_batches))
    limited_radix = radix(plan, timeline, footprint, capacity)
    assert limited_radix.kv_peak <= capacity
    assert limited_radix.recomputed_tokens >= 0


# --------------------------------------------------------------------------------------------------- literal policies
def chain(num_samples: int, num_tokens: int, max_tokens: int):
    """Samples that share their first ``num_tokens`` tokens and part in the last two."""
    rows = [[*range(num_tokens), 1000 + s, 2000 + s] for s in range(num_samples)]
    batch = SampleBatch.from_lists(rows, [[0] * num_tokens + [1, 1]] * num_samples)
    plan = build_plan(batch, max_tokens=max_tokens, shape=SHAPE, footprint=FOOTPRINT)
    return batch, plan, make_timeline(plan, SHAPE, FOOTPRINT)


def test_pages_are_padded_and_not_shared_where_samples_part():
    """29 shared tokens: one full page is shared; the second page of each of three samples is its own, also padded."""
    batch, plan, timeline = chain(3, 29, 16)
    tree = build_tree(batch)
    assert paged(plan, timeline, batch, tree, FOOTPRINT).kv_peak == (1 + 3) * 16 * 10
    assert radix(plan, timeline, FOOTPRINT).kv_peak == (29 + 6) * 10
    assert adaptive(timeline).kv_peak == 19 * 10  # the last ten run with the leaves
    with pytest.raises(ConfigError, match="page_tokens must be at least 1, got 0"):
        paged(plan, timeline, batch, tree, FOOTPRINT, page_tokens=0)


def test_radix_evicts_least_recently_used_and_computes_again():
    """Two trunks of 20 tokens, two leaves each, run one after the other under a capacity of one trunk and a leaf."""
    rows = [[*range(base, base + 20), 500 + base + s, 600 + base + s] for base in (0, 100) for s in range(2)]
    batch = SampleBatch.from_lists(rows, [[0] * 20 + [1, 1]] * 4)
    plan = build_plan(batch, max_tokens=10, shape=SHAPE, footprint=FOOTPRINT)
    timeline = make_timeline(plan, SHAPE, FOOTPRINT)
    assert radix(plan, timeline, FOOTPRINT).recomputed_tokens == 0
    needed = max(mb.path_len + mb.num_tokens for mb in plan.micro_batches)
    limited = radix(plan, timeline, FOOTPRINT, 10 * needed)
    assert limited.kv_peak <= 10 * needed and limited.recomputed_tokens > 0
    with pytest.raises(ConfigError, match=f"need {10 * needed:,} bytes, the capacity is {10 * needed - 10:,}"):
        radix(plan, timeline, FOOTPRINT, 10 * needed - 10)


# -------------------------------------------------------------------------------------------------------- real traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "share"),
    [
        ("alfworld_scripted", 16, None),
        ("webshop_react", 64, None),
        ("textworld_scripted", 16, None),
        ("sweagent_demos", 8, 0.75),
        ("miniswe_gemini3pro", 8, 0.5),
    ],
)
def test_half_of_the_bytes_of_other_caches_on_step_traces(shared_dir: Path, name: str, rows: int, share: float | None):
    """Few long trajectories keep most of their tokens cached, so they need waves, which compute nothing twice."""
    batch, model = recorded_batch(shared_dir, name, rows), load_shape("qwen2.5-7b")
    footprint = dataclasses.replace(model.footprint, attention_bytes_per_token=0)  # waves keep none

    def plan_with(budget: int | None):
        limited = dataclasses.replace(footprint, budget_bytes=budget)
        return build_plan(batch, max_tokens=4096, shape=model.shape, footprint=limited)

    whole = plan_with(None)
    timeline = make_timeline(whole, model.shape, footprint)
    others = (
        paged(whole, timeline, batch, build_tree(batch), footprint),
        radix(whole, timeline, footprint),
    )
    plan = whole if share is None else plan_with(int(share * whole.stats.kv_bytes_peak))
    assert plan.stats.flops_shared == pytest.approx(whole.stats.flops_shared)
    own = adaptive(make_timeline(plan, model.shape, footprint))
    for other in others:
        assert own.kv_peak <= 0.5 * other.kv_peak and own.peak <= 0.5 * other.peak, other.name
