"""The cache with a host tier against the one without: the same content, in the bytes that the plan says."""

import dataclasses

import pytest
import torch

from psrl.cache import BlockShard, CacheBytes, DeviceTier, HostPool, KVCache, TieredKVCache, make_cache
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import PlanError
from psrl.planner import build_plan
from psrl.tiers import HostTier
from psrl.types import SampleBatch
from tests.helpers.forests import step_rows, tree_rows

LAYERS, HEADS, K_DIM, V_DIM = 6, 2, 3, 5
SHAPE = ModelShape(LAYERS, 8, 2, HEADS, 4, 16, 32)
REPEATS = {"none": (), "every layer": tuple((i,) for i in range(LAYERS)), "groups": ((0, 1, 2, 3), (4, 5))}
ROWS = tree_rows(depth=3) + step_rows()
BATCH = SampleBatch.from_lists([row.input_ids for row in ROWS], [row.loss_mask for row in ROWS])
POOL = HostPool(chunk_bytes=1 << 10)
"""Chunks that a unit does not fit into."""


class Zeros(DeviceTier):
    """A last shard may have rows without a token, which hold anything."""

    def empty(self, shape, dtype, device):
        return super().empty(shape, dtype, device).zero_()


def plan_of(share, host, *, dtype=torch.float64, forward_only=False, num_shards=1):
    footprint = KVFootprint.of_values(LAYERS * HEADS * (K_DIM + V_DIM), dtype.itemsize, num_shards=num_shards)
    options = {"max_tokens": 4, "shape": SHAPE, "forward_only": forward_only}
    whole = build_plan(BATCH, footprint=footprint, **options)
    budget = int(share * whole.stats.kv_bytes_peak)
    plan = build_plan(BATCH, footprint=dataclasses.replace(footprint, budget_bytes=budget), host=host, **options)
    assert plan.stats.kv_bytes_peak <= budget
    return plan


def drive(plan, caches, host, dtype, stop=None):
    """Give caches the calls of a model, with random K/V and gradients, and compare what they return.

    Args:
        stop: leave after so many calls of a layer.
    """
    generator = torch.Generator().manual_seed(0)
    calls = 0

    def random(num_tokens, dim):
        return torch.randn(num_tokens, HEADS, dim, generator=generator, dtype=torch.float64).to(dtype)

    def pair(num_tokens):
        return random(num_tokens, K_DIM), random(num_tokens, V_DIM)

    def same(call):
        found = [call(cache) for cache in caches]
        for other in found[1:]:
            assert torch.equal(found[0].k, other.k) and torch.equal(found[0].v, other.v)

    def forward(mb, layer, new, *, writes):
        for cache in caches:
            if writes and mb.own_blocks:
                cache.write(mb.index, layer, *new)
        if mb.path_blocks:
            same(lambda cache: cache.read(mb.index, layer, *new))

    def backward(mb, layer):
        num_stored = caches[0].num_stored(mb.path_blocks)
        if mb.path_blocks:
            grads = pair(num_stored)
            for cache in caches:
                cache.add_grads(mb.index, layer, *grads)
        if mb.own_blocks:
            same(lambda cache: cache.own_grads(mb.index, layer))

    for wave in plan.waves:
        for mb in (plan.micro_batches[index] for index in wave.pass1):
            for layer in range(LAYERS):
                forward(mb, layer, pair(mb.num_tokens), writes=True)
                if mb.path_blocks or mb.own_blocks:
                    ended = {cache.end_layer(mb.index, backward=False) for cache in caches}
                    assert ended == {layer == LAYERS - 1}
                calls += 1
                if calls == stop:
                    return
        for mb in (plan.micro_batches[index] for index in wave.pass2):
            for layer, is_backward in host.visits():
                if not is_backward:
                    forward(mb, layer, pair(mb.num_tokens), writes=False)
                elif mb.path_blocks or mb.own_blocks:
                    backward(mb, layer)
                    assert {cache.end_layer(mb.index, backward=True) for cache in caches} == {layer == 0}
                calls += 1
                if calls == stop:
                    return
    for cache in caches:
        cache.check_drained()


@pytest.mark.parametrize("policy", ["belady", "lru"])
@pytest.mark.parametrize("recompute", REPEATS)
@pytest.mark.parametrize("share", [0.5, 0.3, 0.15])
def test_the_same_content_within_the_budget(share, recompute, policy):
    host = HostTier(1 << 30, LAYERS, REPEATS[recompute], policy)
    plan = plan_of(share, host)
    assert plan.tiers is not None and plan.tiers.policy == policy
    caches = [KVCache(plan, LAYERS), TieredKVCache(plan, LAYERS, pool=POOL)]
    drive(plan, caches, host, torch.float64)
    tiered = caches[1]
    assert tiered.bytes == CacheBytes.predicted(plan.stats) and min(tiered.bytes) > 0
    assert tiered.tier.live_bytes == tiered.host_live_bytes == 0
    assert POOL.num_bytes >= plan.stats.kv_host_bytes_peak


def test_half_precision_and_forward_only():
    host = HostTier(1 << 30, LAYERS)
    for dtype, forward_only, share in ((torch.bfloat16, False, 0.2), (torch.bfloat16, True, 0.4)):
        plan = plan_of(share, host, dtype=dtype, forward_only=forward_only)
        caches = [KVCache(plan, LAYERS), TieredKVCache(plan, LAYERS, pool=POOL)]
        drive(plan, caches, host, dtype)
        assert caches[1].bytes == CacheBytes.predicted(plan.stats) and caches[1].bytes.to_host > 0


def test_shards_of_context_parallel_ranks():
    host = HostTier(1 << 30, LAYERS)
    plan = plan_of(0.2, host, num_shards=2)
    for rank in range(2):
        caches = [
            KVCache(plan, LAYERS, Zeros(), BlockShard(rank, 2)),
            TieredKVCache(plan, LAYERS, Zeros(), BlockShard(rank, 2), pool=POOL),
        ]
        drive(plan, caches, host, torch.float64)
        assert caches[1].bytes == CacheBytes.predicted(plan.stats) and caches[1].bytes.to_host > 0


@pytest.mark.parametrize("stop", [1, 40, 200])
def test_a_plan_that_stops_leaves_nothing(stop):
    host = HostTier(1 << 30, LAYERS)
    plan = plan_of(0.2, host)
    caches = [KVCache(plan, LAYERS), TieredKVCache(plan, LAYERS, pool=POOL)]
    drive(plan, caches, host, torch.float64, stop=stop)
    for cache in caches:
        assert cache.num_live_blocks > 0
        with pytest.raises(PlanError, match="are left after"):
            cache.check_drained()
        cache.close()
        cache.close()
        assert cache.num_live_blocks == 0 and cache.tier.live_bytes == 0
    assert caches[1].host_live_bytes == 0
    again = TieredKVCache(plan, LAYERS, pool=POOL)
    drive(plan, [again], host, torch.float64)
    assert again.bytes == CacheBytes.predicted(plan.stats)


def test_another_order_is_refused():
    host = HostTier(1 << 30, LAYERS)
    plan = plan_of(0.2, host)
    cache = TieredKVCache(plan, LAYERS, pool=POOL)
    mb = plan.micro_batches[plan.waves[0].pass1[0]]
    k, v = torch.zeros(mb.num_tokens, HEADS, K_DIM), torch.zeros(mb.num_tokens, HEADS, V_DIM)
    with pytest.raises(PlanError, match=r"layer 1 of micro-batch 0 \(forward\) is not what the schedule has as step 0"):
        cache.write(mb.index, 1, k.double(), v.double())
    cache = TieredKVCache(plan, LAYERS, pool=POOL)
    with pytest.raises(PlanError, match="bytes, planned were"):
        cache.write(mb.index, 0, k, v)  # half as wide as planned
    cache.close()
    with pytest.raises(PlanError, match="no transfers for 5 layers"):
        TieredKVCache(plan, 5, pool=POOL)


def test_caches_do_not_share_the_pool_at_a_time():
    host = HostTier(1 << 30, LAYERS)
    plan = plan_of(0.2, host)
    first, second = (TieredKVCache(plan, LAYERS, pool=POOL) for _ in range(2))
    drive(plan, [first], host, torch.float64, stop=10)
    with pytest.raises(PlanError, match="the host pool is in use"):
        drive(plan, [second], host, torch.float64, stop=10)
    first.close()
    assert isinstance(make_cache(plan, LAYERS, BlockShard()), TieredKVCache)
