"""The ``flex`` backend: its block mask against the dense one, and PyTorch's compiled CPU kernel on it (forward)."""

import random

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from psrl.errors import UnsupportedError
from psrl.runtime.attention import AttentionLayout, attend_layout, flex
from tests.unit.test_attention import fan, oracle, random_forest, random_inputs

CPU = torch.device("cpu")


@pytest.fixture
def compiled():
    """The device mode, which an earlier test of this process may have switched on, compiles nothing at run time."""
    with torch._dynamo.config.patch(disable=False):
        yield


def dense_blocks(layout, query_block, key_block):
    """[query blocks, key blocks]: which hold a visible pair."""
    queries = np.arange(layout.num_queries)[:, None]
    visible = (layout.first_S <= queries) & (queries < layout.last_S)
    rows = np.add.reduceat(visible, np.arange(0, layout.num_queries, query_block), axis=0)
    return np.add.reduceat(rows, np.arange(0, layout.num_keys, key_block), axis=1) > 0


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16)])
def test_block_mask_is_the_visible_blocks(blocks):
    rng = random.Random(3)
    for _ in range(20):
        num_path, num_tokens = rng.choice([0, 5, 70]), rng.choice([1, 17, 90])
        layout = AttentionLayout.build(*map(np.array, random_forest(rng, num_path, num_tokens)), num_tokens)
        mask = flex.block_mask(layout, CPU, *blocks)
        assert mask.shape == (1, 1, num_tokens, num_path + num_tokens) and blocks == mask.BLOCK_SIZE
        assert np.array_equal(mask.to_dense()[0, 0].numpy() > 0, dense_blocks(layout, *blocks))


def test_block_mask_of_a_chain():
    layout = AttentionLayout.build(np.arange(48), np.full(48, 48), 48)
    mask = flex.block_mask(layout, CPU, 16, 16)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1]]] and mask.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]
    assert mask.kv_indices[0, 0, :, 0].tolist() == [0, 1, 2]
    assert mask.full_kv_indices[0, 0, 2, :2].tolist() == [0, 1]
    assert mask.q_num_blocks.tolist() == [[[1, 1, 1]]] and mask.full_q_num_blocks.tolist() == [[[2, 1, 0]]]


def test_gradients_on_cpu_and_float64_are_refused():
    layout = AttentionLayout.build([0, 1], [2, 2], 2)
    inputs, _ = random_inputs(2, 2, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="'flex' has no backward on cpu"):
        attend_layout(*inputs, layout, backend="flex")
    with pytest.raises(UnsupportedError, match="got float64"):
        attend_layout(*(x.double() for x in inputs), layout, backend="flex")


def test_nothing_to_see_gives_zeros():
    layout = AttentionLayout.build([0, 0], [0, 0], 3)
    inputs, _ = random_inputs(3, 2, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(attend_layout(*inputs, layout, backend="flex"), torch.zeros(3, 4, 16))


@pytest.mark.slow
def test_compiled_forward_matches_the_oracle_and_compiles_once(compiled):
    """Blocks that the mask leaves out are not computed by the compiled kernel: a missing one would show."""
    before = counters["stats"]["unique_graphs"]
    for seed, (num_path, num_tokens) in enumerate([(130, 300), (70, 513), (200, 260), (9, 700)]):
        rng = random.Random(seed)
        layout = AttentionLayout.build(*map(np.array, random_forest(rng, num_path, num_tokens)), num_tokens)
        inputs, grad = random_inputs(num_tokens, num_path + num_tokens, 4, 2, 32, torch.float32, seed)
        with torch.no_grad():
            out = attend_layout(*inputs, layout, backend="flex")
        exact = oracle(*inputs, layout.first_S, layout.last_S, grad)[0]
        assert float((out - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
def test_compiled_forward_without_a_path(compiled):
    layout = AttentionLayout.build(*fan(150, [90, 40]), 280)
    inputs, grad = random_inputs(280, 280, 4, 2, 32, torch.bfloat16)
    with torch.no_grad():
        out = attend_layout(*inputs, layout, backend="flex")
    exact = oracle(*inputs, layout.first_S, layout.last_S, grad)[0]
    assert float((out.double() - exact).norm() / exact.norm()) <= 1e-2
