"""The checkpoint engine ``psrl_gloo``: what a replica receives is what the trainer has, bit by bit."""

import asyncio

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from psrl.errors import RolloutError
from psrl.integrations.verl.trainer.gloo_weights import GlooWeights
from tests.helpers.ranks import RankPool
from tests.helpers.weights import exchange, stream


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = RankPool(3, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.mark.parametrize(("num_trainers", "bucket_size", "num_buckets", "num_bytes"), [
    # 60 | 14 | 60 | 8 | 64 and 64 of 160 | the other 32 and 16
    (2, 64, 7, 318),
    # offsets 0, 64, 80, 144, 160, 320
    (1, 4096, 1, 336),
])  # fmt: skip
def test_a_replica_has_the_bits_of_the_trainer(pool, num_trainers, bucket_size, num_buckets, num_bytes):
    sender, *others = pool.run(exchange, num_trainers, bucket_size, 2)
    for version in (1, 2):
        metrics = sender[version - 1]
        assert (metrics["psrl/weights/buckets"], metrics["psrl/weights/bytes"]) == (num_buckets, num_bytes)
        assert metrics["psrl/weights/seconds"] > 0
        for trainer in others[: num_trainers - 1]:
            assert trainer[version - 1] == ({}, 6)
        for replica in others[num_trainers - 1 :]:
            received, sent = replica[version - 1], list(stream(version))
            assert [name for name, _ in received] == ["embed", "norm", "lm_head", "scale", "proj", "steps"]
            for (_, got), (_, want) in zip(received, sent, strict=True):
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                assert torch.equal(bits(got), bits(want))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_verl_finds_it():
    assert CheckpointEngineRegistry.get("psrl_gloo") is GlooWeights


def test_receiving_outside_an_update_is_an_error():
    async def receive():
        return [item async for item in CheckpointEngineRegistry.new("psrl_gloo", bucket_size=64).receive_weights()]

    with pytest.raises(RolloutError, match="between init_process_group and finalize"):
        asyncio.run(receive())
