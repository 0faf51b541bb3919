"""Context parallelism without processes: who computes which token, who stores what, and where a gather puts it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from psrl.cache import BlockShard, KVCache
from psrl.context import deal_tokens, key_sources, own_tap, query_pairs, shard_size
from psrl.cost import KVFootprint, ModelShape
from psrl.plan_check import check_plan
from psrl.planner import build_plan
from psrl.runtime.attention import AttentionLayout
from psrl.runtime.context import ContextRank, local_part
from psrl.types import SampleBatch
from tests.helpers.forests import FORESTS

SHAPE = ModelShape(2, 8, 2, 1, 3, 16, 32)


def footprint(num_ranks):
    return KVFootprint.of_layers(2, 1, 3, 4, num_shards=num_ranks)


def plan_of(forest, max_tokens, num_ranks):
    rows = FORESTS[forest]()
    batch = SampleBatch.from_lists([row.input_ids for row in rows], [row.loss_mask for row in rows])
    plan = build_plan(batch, max_tokens=max_tokens, shape=SHAPE, footprint=footprint(num_ranks))
    check_plan(plan, batch, footprint(num_ranks))
    return plan


def test_pairs_of_a_chain_behind_a_path_of_two():
    assert query_pairs(np.array([0, 0, 0, 1, 2]), np.array([3, 3, 3, 3, 3]), 3).tolist() == [3, 4, 5]


def test_tokens_of_a_short_chain():
    """The last token sees most and goes to the first rank, the next two to the other, and so on."""
    assert deal_tokens(np.array([1, 2, 3, 4, 5, 6, 7, 8]), 2).tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_runs_of_a_long_chain_are_whole():
    """Sixteen runs of 64 tokens; each rank's work is half of the pairs."""
    tokens = deal_tokens(np.arange(1, 1025), 2)
    runs = [np.flatnonzero(np.diff(part) != 1) + 1 for part in tokens]
    assert all((cuts % 64 == 0).all() for cuts in runs)
    assert [int((part + 1).sum()) for part in tokens] == [262_400, 262_400]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_token_once_and_equally_many(num_ranks):
    """Also where runs do not divide the tokens, and where one token outweighs all others."""
    for length in (1, 7, 13, 100):
        pairs = np.random.default_rng(length).integers(1, 50, length * num_ranks)
        pairs[0] = 10_000
        tokens = deal_tokens(pairs, num_ranks)
        assert tokens.shape == (num_ranks, length) and (np.diff(tokens, axis=1) > 0).all()
        assert sorted(tokens.ravel().tolist()) == list(range(length * num_ranks))


def test_work_of_large_trees_is_balanced():
    """The busiest rank has at most 5 % more pairs than the mean."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 99, 300).tolist() for _ in range(3)]
    ids = [prompt + rng.integers(0, 99, 200).tolist() for prompt in prompts for _ in range(6)]
    batch = SampleBatch.from_lists(ids, [[0] + [1] * 499] * len(ids))
    plan = build_plan(batch, max_tokens=2048, shape=SHAPE, footprint=footprint(4))
    for mb in plan.micro_batches:
        size = mb.num_tokens // 4 * 4
        pairs = query_pairs(mb.first_S, mb.last_S, mb.num_tokens)[:size]
        work = [int(pairs[part].sum()) for part in deal_tokens(pairs, 4)]
        assert max(work) <= 1.05 * np.mean(work), work


def test_sources_and_taps_of_blocks_that_do_not_divide():
    """Blocks of three and two tokens on two ranks: shards of two and one rows, behind them two tokens of a rank."""
    tokens = np.array([[0, 3], [1, 2]])
    assert key_sources(tokens, [3, 2]).tolist() == [0, 1, 5, 2, 7, 3, 8, 9, 4]
    assert [x.tolist() for x in own_tap([3, 2], 0, 2)] == [[0, 1, 2], [0, 1, 3]]
    assert [x.tolist() for x in own_tap([3, 2], 1, 2)] == [[0, 2], [2, 4]]
    assert [x.tolist() for x in own_tap([1, 1], 2, 3)] == [[], []]


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_make_up_the_micro_batch(forest, num_ranks):
    """Each (query, key) pair, row and edge of a micro-batch is on exactly one rank, rows where their token is."""
    plan = plan_of(forest, 5, num_ranks)
    for mb in plan.micro_batches:
        num_tokens = -(-mb.num_tokens // num_ranks) * num_ranks
        group: Any = None  # nothing is communicated
        parts = [local_part(plan, mb, num_tokens, ContextRank(group, rank, num_ranks)) for rank in range(num_ranks)]
        visible = np.zeros((num_tokens, mb.path_len + num_tokens), dtype=int)
        for part in parts:
            visible[part.tokens_t] += mask_of(part.layout)
            rows = np.flatnonzero(np.isin(mb.rows_R, part.tokens_t))
            assert part.tokens_t[part.rows_R].tolist() == mb.rows_R[rows].tolist()
            assert part.row_temperature_R.tolist() == mb.row_temperature_R[rows].tolist()
            assert rows[part.edge_rows_e].tolist() == mb.edge_rows_E[part.edges_e].tolist()
        num_queries, num_keys = mb.num_tokens, mb.path_len + mb.num_tokens
        whole = mask_of(AttentionLayout.build(mb.first_S, mb.last_S, num_queries))
        assert (visible[:num_queries, :num_keys] == whole).all()
        padding = np.arange(num_queries, num_tokens)
        assert visible[num_queries:].sum() == visible[padding, mb.path_len + padding].sum() == len(padding)
        edges = np.sort(np.concatenate([part.edges_e for part in parts]))
        assert edges.tolist() == list(range(len(mb.edges_E)))


def mask_of(layout):
    queries = np.arange(layout.num_queries)[:, None]
    return (layout.first_S <= queries) & (queries < layout.last_S)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_hold_every_token_and_the_predicted_bytes(num_ranks):
    """What ranks write comes back in order from their shards; each has the bytes that the plan predicts."""
    plan = plan_of("tree", 5, num_ranks)
    caches = [KVCache(plan, 1, shard=BlockShard(rank, num_ranks)) for rank in range(num_ranks)]
    keys = torch.arange(len(plan.token_ids_U), dtype=torch.float32)[:, None, None].expand(-1, 1, 3)
    empty = torch.empty(0, 1, 3)
    written = set()
    for index in plan.waves[0].pass1:
        mb = plan.micro_batches[index]
        written.update(mb.own_blocks)
        for cache in caches:
            cache.write(index, 0, keys[mb.tokens_T], -keys[mb.tokens_T])
        for reader in plan.micro_batches:
            if not written.issuperset(reader.path_blocks):
                continue
            rows = torch.cat([cache.read(reader.index, 0, empty, empty).k for cache in caches])
            sizes = [plan.blocks[block].num_tokens for block in reader.path_blocks]
            found = rows[key_sources(np.empty((num_ranks, 0), dtype=np.int64), sizes)]
            spans = [plan.blocks[block].span for block in reader.path_blocks]
            assert found[:, 0, 0].tolist() == [float(u) for span in spans for u in range(span.start, span.end)]
    rows_stored = sum(shard_size(block.num_tokens, num_ranks) for block in plan.blocks)
    assert [cache.tier.live_bytes for cache in caches] == [rows_stored * 2 * 3 * 4] * num_ranks


def test_a_larger_group_needs_less_cache_on_a_rank():
    """A chain of eight, budget 4: a block of four tokens, or one of two rows on each of two ranks."""
    batch = SampleBatch.from_lists([range(1, 9)], [[0] + [1] * 7])
    kwargs = {"max_tokens": 4, "shape": SHAPE}
    alone = build_plan(batch, footprint=footprint(1), **kwargs).stats.kv_bytes_peak
    for num_ranks, share in ((2, 2), (4, 4), (8, 4)):
        plan = build_plan(batch, footprint=footprint(num_ranks), **kwargs)
        assert plan.stats.kv_bytes_peak * share == alone
    assert dataclasses.replace(footprint(2), num_shards=1) == footprint(1)
