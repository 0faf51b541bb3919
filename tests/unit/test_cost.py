"""Work and bytes of latent attention, in numbers of DeepSeek-V3."""

from psrl.cost import KVFootprint, LatentShape, ModelShape, Work
from psrl.planner import build_plan
from psrl.types import SampleBatch

LATENT = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128)
SIZES = {"num_layers": 1, "hidden_size": 7168, "num_heads": 128, "num_kv_heads": 128, "head_dim": 128}
SHAPE = ModelShape(**SIZES, ffn_size=0, output_size=0, latent=LATENT)


def test_latent_attention():
    query, down, expansion, out = 48_758_784, 4_128_768, 16_777_216, 117_440_512
    assert SHAPE.flops_per_token == 2 * (query + down + expansion + out)
    assert SHAPE.flops_per_pair == 2 * 128 * (192 + 128)
    assert SHAPE.flops_per_path_token == 2 * expansion
    assert SHAPE.cached_values == 576
    whole = LatentShape(query_rank=0, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128)
    assert whole.projections_size(7168, 128) == 7168 * 128 * 192 + down + expansion + out


def test_heads_of_their_own():
    shape = ModelShape(**SIZES, ffn_size=0, output_size=0)
    assert shape.flops_per_token == 2 * 7168 * 128 * 4 * 128
    assert (shape.flops_per_pair, shape.flops_per_path_token, shape.cached_values) == (4 * 128 * 128, 0.0, 32_768)


def test_bytes_of_a_token():
    assert KVFootprint.of_values(61 * 576, 2) == KVFootprint(70_272, 140_544)
    assert KVFootprint.of_layers(2, 4, 8, 8, budget_bytes=9, num_shards=3) == KVFootprint(1024, 1024, 9, 3)


def test_every_reader_expands_its_path():
    """A chain of ten with a branch after six, budget 4: segments of four and two tokens, two leaves. The second segment
    reads 4 tokens in pass 1 and 2, each leaf 6; a backward counts twice."""
    batch = SampleBatch.from_lists([range(1, 11), [1, 2, 3, 4, 5, 6, 11]], [[0] + [1] * 9, [0] + [1] * 6])
    footprint = KVFootprint.of_values(SHAPE.cached_values, 2)
    plan = build_plan(batch, max_tokens=4, shape=SHAPE, footprint=footprint)
    assert [mb.path_len for mb in plan.micro_batches] == [0, 4, 6, 6]
    unique, spine = Work(11, 55 + 7, 0), Work(6, 21, 0)
    rest = SHAPE.forward_flops(unique) + SHAPE.backward_flops(unique) + SHAPE.forward_flops(spine)
    assert plan.stats.flops_shared == rest + (3 * 16 + 4) * SHAPE.flops_per_path_token
    assert plan.stats.kv_bytes_peak == 6 * (1152 + 2304)
