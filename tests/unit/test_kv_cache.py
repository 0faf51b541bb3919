"""The cache manager: what is stored, accumulated and freed, block by block."""

import pytest
import torch

from psrl.cache import KVCache
from psrl.cost import KVFootprint, ModelShape
from psrl.errors import PlanError
from psrl.planner import build_plan
from psrl.systems import System
from psrl.types import CachePolicy, SampleBatch, Span, Wave

LAYERS, HEADS, DIM = 2, 1, 3
SHAPE = ModelShape(LAYERS, 8, 2, HEADS, DIM, 16, 32)


@pytest.fixture
def plan():
    """A chain of ten with a branch after six, budget 4: segments (0, 1), leaves (2, 3), two blocks of three tokens."""
    batch = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
    plan = build_plan(batch, max_tokens=4, shape=SHAPE, footprint=KVFootprint.of_layers(LAYERS, HEADS, DIM, 4))
    assert plan.waves == (Wave((0, 1), (2, 3, 1, 0)),)
    return plan


def rows(plan, micro_batch, start=0.0, dtype=torch.float32):
    """Distinct K for the tokens of a micro-batch; V is its negative."""
    tokens = torch.from_numpy(plan.micro_batches[micro_batch].tokens_T).to(dtype)
    k = (tokens + start)[:, None, None].expand(-1, HEADS, DIM).contiguous()
    return k, -k


def finish(cache, micro_batch, *, backward):
    for _ in range(LAYERS):
        cache.end_layer(micro_batch, backward=backward)


def store(cache, plan):
    for micro_batch in (0, 1):
        for layer in range(LAYERS):
            cache.write(micro_batch, layer, *rows(plan, micro_batch, 100.0 * layer))
        finish(cache, micro_batch, backward=False)


def test_a_plan_from_first_write_to_last_free(plan):
    cache = KVCache(plan, LAYERS)
    first, second = (block.num_tokens for block in plan.blocks)
    kv_bytes = 2 * LAYERS * HEADS * DIM * 4
    assert [block.span for block in plan.blocks] == [Span(0, first), Span(first, 6)]
    store(cache, plan)
    assert cache.tier.live_bytes == 6 * kv_bytes and cache.num_live_blocks == 2

    leaf = plan.micro_batches[2]
    k, v = cache.read(2, 1, *rows(plan, 2))
    assert k[: leaf.path_len, 0, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert k[leaf.path_len :, 0, 0].tolist() == leaf.tokens_T.tolist() and torch.equal(v, -k)

    for micro_batch in (2, 3):
        for layer in range(LAYERS):
            grad = torch.ones(6, HEADS, DIM)
            cache.add_grads(micro_batch, layer, grad, 2 * grad)
            cache.end_layer(micro_batch, backward=True)
    # Both leaves are done: nobody reads the second block's K/V any more, but segment 1 still reads the first.
    assert cache.tier.live_bytes == (first + 6) * kv_bytes
    own = cache.own_grads(1, 0)
    assert own.k.shape == (second, HEADS, DIM) and own.k.unique().tolist() == [2.0] and own.v.unique().tolist() == [4.0]

    for layer in range(LAYERS):
        cache.add_grads(1, layer, torch.ones(first, HEADS, DIM), torch.zeros(first, HEADS, DIM))
        cache.end_layer(1, backward=True)
    assert cache.tier.live_bytes == first * kv_bytes  # accumulators of the first block
    assert cache.own_grads(0, 1).k.unique().tolist() == [3.0]
    finish(cache, 0, backward=True)
    cache.check_drained()
    assert cache.tier.live_bytes == 0 and cache.tier.peak_bytes == plan.stats.kv_bytes_peak == 12 * kv_bytes


def test_a_path_lent_in_place(plan):
    """The same blocks that ``read`` gathers; what is added to the accumulators is what the tap gives."""
    cache = KVCache(plan, LAYERS)
    store(cache, plan)
    path = cache.path_blocks(2)
    assert path.sizes == [block.num_tokens for block in plan.blocks] and sum(path.sizes) == 6
    assert torch.cat(path.k, dim=1)[1, :, 0, 0].tolist() == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert all(torch.equal(v, -k) for k, v in zip(path.k, path.v, strict=True))

    live = cache.tier.live_bytes
    for micro_batch in (2, 3):
        for layer in range(LAYERS):
            grads = cache.path_grads(micro_batch)
            for dk, dv in zip(grads.k, grads.v, strict=True):
                dk[layer] += 1 + layer
                dv[layer] += 2
            assert cache.end_layer(micro_batch, backward=True) == (layer == LAYERS - 1)
        assert cache.tier.live_bytes == (live * 2 if micro_batch == 2 else live * 2 - live * path.sizes[1] // 6)
    assert [cache.own_grads(1, layer).k.unique().tolist() for layer in range(LAYERS)] == [[2.0], [4.0]]
    assert cache.own_grads(1, 0).v.unique().tolist() == [4.0]


def test_a_lent_path_has_room_and_sizes():
    """Pages of four tokens: rows behind the last token of a block are no part of the path."""
    batch = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
    footprint = KVFootprint.of_layers(LAYERS, HEADS, DIM, 4)
    paged = System("pages of four", "a test", cache=CachePolicy(page_tokens=4))
    plan = build_plan(batch, max_tokens=4, shape=SHAPE, footprint=footprint, system=paged)
    cache = KVCache(plan, LAYERS)
    (reader, *_) = [mb.index for mb in plan.micro_batches if not mb.is_spine and len(mb.path_blocks) == 2]
    for micro_batch in plan.waves[0].pass1:
        for layer in range(LAYERS):
            cache.write(micro_batch, layer, *rows(plan, micro_batch))
        finish(cache, micro_batch, backward=False)
    path, grads = cache.path_blocks(reader), cache.path_grads(reader)
    assert path.sizes == grads.sizes == [4, 2]
    assert [x.shape for x in (*path.k, *grads.v)] == [(LAYERS, 4, HEADS, DIM)] * 4


def test_accumulators_are_wider_than_half_precision(plan):
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        cache = KVCache(plan, 1)
        for micro_batch in (0, 1):
            cache.write(micro_batch, 0, *rows(plan, micro_batch, dtype=dtype))
            cache.end_layer(micro_batch, backward=False)
        tiny = torch.full((6, HEADS, DIM), 1e-3, dtype=dtype)
        cache.add_grads(2, 0, tiny + 1, tiny)
        cache.end_layer(2, backward=True)
        cache.add_grads(3, 0, tiny, tiny)
        assert {x.dtype for x in (*cache.path_grads(3).k, *cache.path_grads(3).v)} == {wide}
        total = cache.own_grads(1, 0).k
        assert total.dtype == wide
        assert total[0, 0, 0].item() == pytest.approx(float(tiny[0, 0, 0] + 1) + float(tiny[0, 0, 0]), abs=1e-7)


def test_the_tap_refuses_to_come_first(plan):
    cache = KVCache(plan, LAYERS)
    store(cache, plan)
    with pytest.raises(PlanError, match="backward of micro-batch 1 before any reader"):
        cache.own_grads(1, 0)


def test_reading_a_freed_block_is_a_bug(plan):
    cache = KVCache(plan, LAYERS)
    with pytest.raises(PlanError, match="micro-batch 2 reads KV block 0, which is not live"):
        finish(cache, 2, backward=True)


def test_leftovers_are_reported(plan):
    cache = KVCache(plan, LAYERS)
    store(cache, plan)
    with pytest.raises(PlanError, match="2 KV blocks and 0 accumulators are left"):
        cache.check_drained()
