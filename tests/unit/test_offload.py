"""The transfer schedule: who leaves the device, when it comes back, and where it lies on the host."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.analyze.shapes import load_shape
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import ConfigError, MemoryBudgetError, PlanError
from psrl.host_pool import place
from psrl.offload import accesses
from psrl.plan_check import check_plan
from psrl.plan_view.timeline import make_timeline
from psrl.planner import build_plan
from psrl.systems import SYSTEMS
from psrl.tier_check import check_transfers
from psrl.tiers import HostTier, Save, Unit
from psrl.types import SampleBatch, Wave
from tests.helpers.traces import recorded_batch
from tests.unit.test_workloads import workloads

LAYERS = 2
SHAPE = ModelShape(LAYERS, 8, 2, 1, 3, 16, 32)
FOOTPRINT = KVFootprint(kv_bytes_per_token=10 * LAYERS, grad_bytes_per_token=20 * LAYERS)
CHAIN = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
"""Budget 4: spine segments (0, 1) of three tokens, leaves (2, 3), two blocks."""
HOST = HostTier(1 << 30, LAYERS)


def plan_of(batch=CHAIN, budget=None, *, max_tokens=4, host: HostTier | None = HOST, footprint=FOOTPRINT, **options):
    limited = dataclasses.replace(footprint, budget_bytes=budget)
    return build_plan(batch, max_tokens=max_tokens, shape=SHAPE, footprint=limited, host=host, **options)


def kv(block, layer):
    return Unit(block, layer, False)


def grad(block, layer):
    return Unit(block, layer, True)


def names(steps):
    return [f"{step.micro_batch}{'b' if step.backward else 'f'}{step.layer}" for step in steps]


# ------------------------------------------------------------------------------------------------------ visits, steps
def test_how_a_backward_visits_the_layers():
    def visits(*repeats):
        return "".join(f"{'b' if v.backward else 'f'}{v.layer}" for v in HostTier(1, 4, repeats).visits())

    assert visits() == "f0f1f2f3b3b2b1b0"
    assert visits((0,), (1,), (2,), (3,)) == "f0f1f2f3b3f2b2f1b1f0b0"  # the last one is not read twice in a row
    assert visits((0, 1), (2, 3)) == "f0f1f2f3f2f3b3b2f0f1b1b0"
    assert visits((0,), (1,)) == "f0f1f2f3b3b2f1b1f0b0"  # two layers of a block


def test_steps_follow_the_plan():
    plan = plan_of()
    assert plan.waves == (Wave((0, 1), (2, 3, 1, 0)),) and plan.tiers is None
    found = list(accesses(plan.micro_batches, plan.waves, HOST))
    # Segment 0 has no path, so its forward in pass 2 needs nothing.
    assert names(found) == [
        *("0f0", "0f1", "1f0", "1f1"),
        *("2f0", "2f1", "2b1", "2b0", "3f0", "3f1", "3b1", "3b0", "1f0", "1f1", "1b1", "1b0", "0b1", "0b0"),
    ]
    assert found[2].reads == (kv(0, 0),) and found[2].creates == found[2].changes == (kv(1, 0),)
    first, second = found[6], found[10]
    assert first.creates == first.changes == (grad(0, 1), grad(1, 1)) and first.reads == ()
    assert second.reads == second.changes == (grad(0, 1), grad(1, 1)) and second.creates == ()
    last_of_segment_1 = found[14]
    assert last_of_segment_1.reads == (grad(0, 1), grad(1, 1)) and last_of_segment_1.changes == (grad(0, 1),)


# ---------------------------------------------------------------------------------------------------------- schedules
def test_a_schedule_from_first_write_to_last_free():
    """Blocks of four and two tokens: a layer has 60 bytes of K/V and 120 of accumulators, the budget is 150."""
    plan = plan_of(budget=150)
    schedule = plan.tiers
    assert schedule is not None and plan.stats.num_waves == 1
    assert (schedule.kv_unit_bytes, schedule.grad_unit_bytes) == ((40, 20), (80, 40))
    check_plan(plan, CHAIN, dataclasses.replace(FOOTPRINT, budget_bytes=150), HOST)
    steps = dict(zip(names(schedule.steps)[4:], schedule.steps[4:], strict=True))  # pass 2

    # Layer 1 runs backward: its K/V are needed last of all, then those of block 0, layer 0. They were saved before.
    step = steps["2b1"]
    assert step.evicts == (kv(0, 1), kv(1, 1), kv(0, 0)) and step.saves == () and step.prefetches == ()
    assert step.allocates == (grad(0, 1), grad(1, 1))
    assert (step.kv_bytes, step.grad_bytes, step.host_bytes) == (20, 120, 40 + 40 + 20)
    # The other leaf reads layer 0, and while it runs, layer 1 begins to come.
    step = steps["3f0"]
    assert step.saves == (Save(grad(0, 0), 256), Save(grad(1, 0), 336)) and step.evicts == (grad(0, 0),)
    assert step.fetches == (kv(0, 0),) and step.prefetches == (kv(0, 1),) and step.frees == (kv(1, 0),)
    assert (step.kv_bytes, step.grad_bytes) == (100, 40)
    # It adds to the accumulators of layer 1: what the host has of them is old, and is copied again to be evicted.
    assert steps["3b1"].stale == (grad(0, 1), grad(1, 1))
    assert steps["3b0"].saves == (Save(grad(0, 1), 96), Save(grad(1, 1), 176))
    # K/V do not change: block 0 is dropped a second time without a copy.
    assert kv(0, 0) in steps["3f1"].evicts and kv(0, 0) not in [save.unit for save in steps["3f0"].saves]
    assert steps["0b0"].frees == (grad(0, 0),)

    stats = plan.stats
    assert (stats.kv_bytes_peak, stats.kv_host_bytes_peak) == (140, 376)
    assert (stats.kv_bytes_to_host, stats.kv_bytes_to_device) == (740, 820)


def test_a_tight_budget_holds_one_layer_at_a_time():
    """120 bytes: the accumulators of one layer."""
    plan = plan_of(budget=120)
    assert plan.stats.kv_bytes_peak == 120
    check_plan(plan, CHAIN, dataclasses.replace(FOOTPRINT, budget_bytes=120), HOST)
    with pytest.raises(
        MemoryBudgetError, match=r"layer of micro-batch 2 .* needs 120 bytes .*kv_cache_bytes allows 119"
    ):
        plan_of(budget=119)


def test_what_fits_in_waves_needs_no_host():
    batch = SampleBatch.from_lists(
        [[*range(base, base + 12), base + 50 + s] for base in (0, 100) for s in range(2)], [[0] * 12 + [1]] * 4
    )
    whole = plan_of(batch).stats.kv_bytes_peak
    plan = plan_of(batch, int(0.8 * whole))
    assert plan.stats.num_waves == 2 and plan.tiers is None
    # A little less, and it is enough to free and allocate layer by layer: nothing moves.
    plan = plan_of(batch, int(0.7 * whole))
    assert plan.tiers is not None and plan.stats.kv_bytes_peak == int(0.7 * whole)
    assert (plan.stats.kv_host_bytes_peak, plan.stats.kv_bytes_to_host, plan.stats.kv_bytes_to_device) == (0, 0, 0)


def test_without_a_host_tier_the_budget_is_an_error_as_before():
    with pytest.raises(MemoryBudgetError, match=r"sample 0 .* needs .* psrl.kv_cache_bytes allows 150"):
        plan_of(budget=150, host=None)


def test_the_host_pool_has_a_budget_too():
    needed = plan_of(budget=150).stats.kv_host_bytes_peak
    assert plan_of(budget=150, host=HostTier(needed, LAYERS)).stats.kv_host_bytes_peak == needed
    with pytest.raises(MemoryBudgetError, match=rf"needs {needed} bytes of host .*kv_host_bytes allows {needed - 1}"):
        plan_of(budget=150, host=HostTier(needed - 1, LAYERS))


def test_the_error_of_a_step_names_its_sample():
    with pytest.raises(MemoryBudgetError) as caught:
        plan_of(budget=10)
    assert caught.value.sample == 0


def test_forward_only_plans_are_offloaded_too():
    plan = plan_of(budget=70, forward_only=True)
    assert plan.tiers is not None and plan.stats.kv_bytes_peak <= 70
    check_plan(plan, CHAIN, dataclasses.replace(FOOTPRINT, budget_bytes=70), HOST)


def test_the_host_tier_is_psrls_own():
    with pytest.raises(ConfigError, match=r"psrl\.kv_host_bytes.* system radix"):
        plan_of(system=SYSTEMS["radix"])
    with pytest.raises(ConfigError, match="one of belady, lru, got 'fifo'"):
        HostTier(1, 1, policy="fifo")


# -------------------------------------------------------------------------------------------------------------- pool
def test_places_in_the_host_pool():
    """Copies of 30, 60 and 30 bytes begin at multiples of 16; a place that ends is taken by what fits it best."""
    sizes = {kv(0, 0): 30, kv(1, 0): 60, kv(2, 0): 30, kv(3, 0): 64, kv(4, 0): 90}
    units = list(sizes)
    placed = place(
        [(units[:3], [units[0]]), ([units[3]], [units[1]]), ([units[4]], [units[2], units[3], units[4]])],
        sizes.__getitem__,
    )
    assert placed.starts == ((0, 32, 96), (128,), (0,))  # the first two places join for the last copy
    assert placed.bytes_in_use == (120, 154, 184) and placed.size == 192


# ------------------------------------------------------------------------------------------------------------ checker
def test_the_checker_finds_what_is_wrong():
    footprint = dataclasses.replace(FOOTPRINT, budget_bytes=130)
    plan = plan_of(budget=130)
    schedule = plan.tiers
    assert schedule is not None
    check_transfers(plan, footprint, HOST)

    def spoiled(change):
        steps = list(schedule.steps)
        change(steps)
        return dataclasses.replace(plan, tiers=dataclasses.replace(schedule, steps=tuple(steps)))

    def without(name):
        def change(steps):
            at = next(i for i, step in enumerate(steps) if getattr(step, name))
            steps[at] = dataclasses.replace(steps[at], **{name: ()})

        return change

    for name, message in (
        ("saves", "bytes on the host"), ("evicts", "bytes on the device"), ("prefetches", "bytes on the device"),
        ("allocates", "needs"), ("frees", "bytes on the device|accumulators"), ("stale", "no use any more"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            check_transfers(spoiled(without(name)), footprint, HOST)
    with pytest.raises(PlanError, match="a step too many"):
        check_transfers(spoiled(lambda steps: steps.append(steps[-1])), footprint, HOST)
    with pytest.raises(PlanError, match="exceeds the budget"):
        check_transfers(plan, dataclasses.replace(footprint, budget_bytes=plan.stats.kv_bytes_peak - 1), HOST)
    with pytest.raises(PlanError, match="place of"):
        check_transfers(plan, footprint, HostTier(plan.stats.kv_host_bytes_peak - 1, LAYERS))
    with pytest.raises(PlanError, match="predicted bytes"):
        wrong = dataclasses.replace(schedule, bytes_to_host=schedule.bytes_to_host + 1)
        check_transfers(dataclasses.replace(plan, tiers=wrong), footprint, HOST)


# ------------------------------------------------------------------------------------------------------------ forests
NUM_LAYERS = 8
REPEATS = ((), tuple((layer,) for layer in range(NUM_LAYERS)), ((0, 1, 2), (3, 4, 5), (6, 7)), ((0,), (1,)))
FORESTS = (
    workloads(), st.sampled_from([1, 3, 7, 16]), st.booleans(), st.sampled_from([0.5, 0.25, 0.1]),
    st.sampled_from(REPEATS), st.sampled_from([16, 24]),
)  # fmt: skip


def check_forest(batch, max_tokens, forward_only, share, repeats, grad_bytes):
    """Every schedule is valid, keeps its budget, and moves no more bytes than LRU's."""
    wide = KVFootprint(16 * NUM_LAYERS, grad_bytes * NUM_LAYERS)
    options = {"max_tokens": max_tokens, "forward_only": forward_only, "footprint": wide}
    peak = plan_of(batch, **options).stats.kv_bytes_peak
    budget = max(1, int(share * peak))

    def offloaded(policy):
        return plan_of(batch, budget, host=HostTier(1 << 40, NUM_LAYERS, repeats, policy), **options)

    try:
        plan = offloaded("belady")
    except MemoryBudgetError as error:
        assert "one layer of micro-batch" in str(error)
        return
    if plan.tiers is None:
        return
    limited = dataclasses.replace(wide, budget_bytes=budget)
    check_plan(plan, batch, limited, HostTier(1 << 40, NUM_LAYERS, repeats))
    lru = offloaded("lru")
    check_plan(lru, batch, limited, HostTier(1 << 40, NUM_LAYERS, repeats))
    assert lru.tiers is not None and plan.tiers.bytes_moved <= lru.tiers.bytes_moved
    executions = make_timeline(plan, SHAPE, limited).executions
    assert max(e.bytes for e in executions) == plan.stats.kv_bytes_peak
    assert sum(e.bytes_to_host for e in executions) == plan.stats.kv_bytes_to_host
    assert sum(e.bytes_to_device for e in executions) == plan.stats.kv_bytes_to_device
    assert (executions[-1].kv_bytes_after, executions[-1].grad_bytes_after) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
@pytest.mark.parametrize(
    ("name", "rows"), [("alfworld_tree_scripted", 24), ("webshop_react", 64), ("sweagent_demos", 4)]
)
def test_traces(shared_dir, name, rows, share):
    """A 7B model's 28 layers: the schedule is valid, and moves no more bytes than LRU's."""
    batch, model = recorded_batch(shared_dir, name, rows), load_shape("qwen2.5-7b")
    options = {"max_tokens": 2048, "shape": model.shape}
    whole = build_plan(batch, footprint=model.footprint, **options).stats.kv_bytes_peak
    limited = dataclasses.replace(model.footprint, budget_bytes=int(share * whole))
    moved = []
    for policy in ("belady", "lru"):
        host = HostTier(1 << 40, model.shape.num_layers, (), policy)
        plan = build_plan(batch, footprint=limited, host=host, **options)
        if plan.tiers is None:
            assert plan.stats.num_waves > 1
            return
        check_transfers(plan, limited, host)
        moved.append(plan.tiers.bytes_moved)
    assert moved[0] <= moved[1]


@settings(max_examples=8, deadline=None, derandomize=True)  # of forests that differ in work by a factor of ten
@given(*FORESTS)
def test_forests(batch, max_tokens, forward_only, share, repeats, grad_bytes):
    check_forest(batch, max_tokens, forward_only, share, repeats, grad_bytes)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(*FORESTS)
def test_a_thousand_forests(batch, max_tokens, forward_only, share, repeats, grad_bytes):
    check_forest(batch, max_tokens, forward_only, share, repeats, grad_bytes)
