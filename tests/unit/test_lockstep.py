"""Micro-batches that ranks add to keep in step, padding of micro-batches, and shares of rows."""

import numpy as np
import pytest
import torch

from psrl.cost import KVFootprint, ModelShape
from psrl.data.samples import ReplaySample
from psrl.integrations.megatron.lockstep import align_waves
from psrl.planner import build_plan
from psrl.replay.shares import share_of
from psrl.runtime.routing import RouterLoads
from psrl.runtime.session import DUMMY, RouterSamples, Session
from psrl.types import SampleBatch, Wave

CPU = torch.device("cpu")


def aligned(*waves: Wave, multiple: int = 1, forward_only: bool = False):
    return align_waves(waves, forward_only=forward_only, multiple=multiple, group=None, device=CPU)


def test_passes_are_filled_up_to_a_multiple():
    assert aligned(Wave((0, 1, 2), (3, 2, 1, 0)), multiple=2) == (Wave((0, 1, 2, DUMMY), (3, 2, 1, 0)),)
    assert aligned(Wave((), (0,)), multiple=2) == (Wave((), (0, DUMMY)),)
    assert aligned(Wave((0,), (1, 0))) == (Wave((0,), (1, 0)),)


def test_an_update_ends_with_a_micro_batch_and_inference_need_not():
    assert aligned(Wave((), ()), multiple=2) == (Wave((), (DUMMY, DUMMY)),)
    assert aligned(Wave((), ()), forward_only=True) == (Wave((), ()),)


@pytest.fixture
def session():
    """Two samples of five and four tokens that share three; one micro-batch of six tokens, padded to eight."""
    batch = SampleBatch.from_lists([[1, 2, 3, 4, 5], [1, 2, 3, 6]], [[0, 0, 0, 1, 1], [0, 0, 0, 1]])
    footprint = KVFootprint.of_layers(1, 1, 4, 4)
    plan = build_plan(batch, max_tokens=16, shape=ModelShape(1, 8, 2, 1, 4, 16, 32), footprint=footprint)
    router = RouterSamples(np.array([2, 2, 2, 1, 1, 1]), 9, RouterLoads(9))
    return Session(
        plan, chunk_layers=(1, 2), device=CPU, attention_backend="reference", token_multiple=4, router=router
    )


def test_padding_is_seen_by_itself_only_and_counts_for_nothing(session):
    micro_batch = session.execution(0, backward=True).micro_batch
    assert micro_batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert micro_batch.token_weights_T.tolist() == [2, 2, 2, 1, 1, 1, 0, 0]
    layout = micro_batch.layout
    assert layout.first_S.tolist() == list(range(8)) and layout.last_S.tolist() == [6, 6, 6, 5, 5, 6, 7, 8]


def test_a_dummy_is_padding_alone(session):
    execution = session.execution(DUMMY, chunk=1, backward=True)
    micro_batch = execution.micro_batch
    assert micro_batch.is_dummy and not micro_batch.has_edges
    assert micro_batch.token_ids_T.tolist() == micro_batch.token_weights_T.tolist() == [0, 0, 0, 0]
    assert micro_batch.rows_R.tolist() == [0]
    assert execution.cache is session.caches[1] and session.caches[1].num_layers == 2


def test_loads_count_shared_tokens_for_every_sample():
    loads = RouterLoads(9)
    routes = torch.tensor([[1, 0], [0, 1], [1, 1]]).bool()
    loads.add(3, torch.tensor([2, 1, 0]), routes)
    loads.add(3, torch.tensor([1, 1, 1]), routes)
    loads.finish(None)
    assert loads.tokens_per_expert_X[3].tolist() == [4.0, 3.0]


def sample(name: str, num_targets: int) -> ReplaySample:
    mask = np.arange(num_targets + 1) > 0
    return ReplaySample(
        where=name,
        input_ids_N=np.arange(num_targets + 1) + 7,
        loss_mask_N=mask,
        position_ids_N=np.arange(num_targets + 1),
        advantages_M=np.ones(num_targets),
        old_log_probs_M=None,
        uid=name,
        session=name,
        index=0,
    )


def test_shares_of_rows_are_equal_with_padding_that_has_no_target():
    samples = [sample(name, count) for name, count in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 1), ("f", 2))]
    cu_targets = np.cumsum([0, 1, 2, 3, 1, 1, 2])
    shares = [share_of(samples, slice(0, 6), 3, cu_targets, rank, 2) for rank in range(2)]
    assert [[s.where for s in share.samples if s.num_targets] for share in shares] == [["a", "b", "d", "e"], ["c", "f"]]
    assert [len(share.samples) for share in shares] == [4, 4] and shares[0].num_padded == 4
    assert [share.targets_m.tolist() for share in shares] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]
    padding = shares[1].samples[1]
    assert (padding.input_ids_N.tolist(), padding.num_targets) == ([7, 7], 0) and not padding.loss_mask_N.any()
