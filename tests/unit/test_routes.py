"""Routes as a part of prefixes: equal ids for equal sets of experts and for nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.cost import KVFootprint, ModelShape
from psrl.errors import PlanError
from psrl.plan_check import check_plan
from psrl.planner import build_plan
from psrl.routes import NATIVE, equal_rows, number_routes, share_last_tokens, unique_experts, with_routes
from psrl.tree import build_tree
from psrl.types import SampleBatch

SHAPE = ModelShape(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=16, output_size=32)


def batch_of(*rows):
    return SampleBatch.from_lists(rows, [[0] + [1] * (len(row) - 1) for row in rows])


def routes_of(*experts, native=()):
    """One layer, two experts a token."""
    experts_NLK = np.asarray(experts, dtype=np.int16).reshape(-1, 1, 2)
    replayed = np.ones(len(experts_NLK), dtype=bool)
    replayed[list(native)] = False
    return number_routes(experts_NLK, replayed)


def test_routes_are_sets_of_experts():
    routes = routes_of((0, 3), (3, 0), (0, 2), (1, 1), native=[3])
    assert routes.ids_N[0] == routes.ids_N[1] != routes.ids_N[2]
    assert routes.ids_N[3] == NATIVE
    assert routes.table_RLK[routes.ids_N[:3]].tolist() == [[[0, 3]], [[0, 3]], [[0, 2]]]


def test_a_layer_that_differs_is_another_route():
    experts = np.asarray([[[0, 1], [2, 3]], [[0, 1], [3, 1]], [[1, 0], [3, 2]]], dtype=np.int16)
    ids = number_routes(experts, np.ones(3, dtype=bool)).ids_N
    assert ids[0] == ids[2] != ids[1]


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), max_size=30), st.sampled_from([1, 2, 3, 1 << 60]))
def test_equal_rows_whatever_collides(rows, num_hashes):
    array = np.asarray(rows, dtype=np.int16).reshape(-1, 5)
    firsts, kinds = equal_rows(array, lambda words: words[:, 0] % np.uint64(num_hashes))
    assert array[firsts][kinds].tolist() == array.tolist()
    assert len(firsts) == len({tuple(row) for row in rows})


def test_tokens_are_shared_where_routes_agree_on_the_whole_prefix():
    batch = batch_of([5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 9])
    routes = routes_of(
        (0, 1), (0, 1), (0, 1), (0, 1),
        (1, 0), (0, 2), (0, 1), (0, 1),  # the second token parts; its successors agree again, but do not share
        (0, 1), (1, 0), (0, 1), (0, 1),
    )  # fmt: skip
    tree = build_tree(with_routes(batch, routes))
    assert tree.num_tokens == 8
    assert tree.index_N[[0, 1, 2]].tolist() == tree.index_N[[8, 9, 10]].tolist()
    assert tree.index_N[0] == tree.index_N[4] and not set(tree.index_N[:4]) & set(tree.index_N[5:8])
    experts = unique_experts(routes, tree.index_N)
    assert experts[tree.index_N, 0].tolist() == np.sort(routes.table_RLK[routes.ids_N][:, 0]).tolist()


def test_a_last_token_without_a_route_takes_that_of_a_longer_sample():
    batch = batch_of([5, 6, 7], [5, 6, 7, 8], [5, 6, 9], [4, 6, 7])
    last = [2, 6, 9, 12]
    routes = routes_of(*[(0, t % 2 + 1) for t in (0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2)], native=last)
    assert build_tree(with_routes(batch, routes)).num_tokens == 9
    shared = share_last_tokens(batch, routes)
    assert shared.ids_N[2] == routes.ids_N[5] != NATIVE
    assert shared.ids_N[last[1:]].tolist() == [NATIVE] * 3
    tree = build_tree(with_routes(batch, shared))
    assert tree.num_tokens == 8 == build_tree(batch).num_tokens
    assert (unique_experts(shared, tree.index_N)[tree.index_N[last[1:]]] == NATIVE).all()


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=8), min_size=1, max_size=8),
    st.sampled_from([1, 2, 5, 100]),
)
def test_plans_keep_routes_apart(rows, max_tokens):
    batch = batch_of(*[[token for token, _ in row] for row in rows])
    routes = routes_of(*[(0, expert) for row in rows for _, expert in row])
    routed, footprint = with_routes(batch, routes), KVFootprint(1, 1)
    plan = build_plan(routed, max_tokens=max_tokens, shape=SHAPE, footprint=footprint)
    check_plan(plan, routed, footprint)
    assert plan.stats.unique_tokens == len({tuple(row[: t + 1]) for row in rows for t in range(len(row))})


def test_the_checker_notices_routes_that_were_mixed_up():
    batch, footprint = batch_of([5, 6, 7], [5, 6, 7], [5, 6, 7]), KVFootprint(1, 1)
    route = {"a": (0, 1), "b": (0, 2)}
    first_two, outer_two = (
        with_routes(batch, routes_of(*[route[name] for name in names for _ in range(3)])) for names in ("aab", "aba")
    )
    plan = build_plan(first_two, max_tokens=9, shape=SHAPE, footprint=footprint)
    check_plan(plan, first_two)
    with pytest.raises(PlanError, match="extra inputs"):
        check_plan(plan, outer_two)
