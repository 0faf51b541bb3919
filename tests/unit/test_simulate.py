"""The simulator: schedules against bubbles worked out by hand, costs, layouts, formats, and a whole run."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from psrl.cost import LatentShape
from psrl.data import ReplaySample
from psrl.errors import ConfigError, InputError
from psrl.model_sizes import NAMED_MODELS, ModelSizes, load_model
from psrl.placement.upstream import balanced_partition, upstream_order
from psrl.planner import build_plan
from psrl.simulate.calibration import Calibration, CallOverhead, Direction, Link, load_calibration, presets
from psrl.simulate.cluster import ClusterLayout, all_reduce_seconds, gather_seconds
from psrl.simulate.costs import CostModel, StageCosts, expert_groups
from psrl.simulate.job import Simulation, simulate
from psrl.simulate.partition import upstream_micro_batches
from psrl.simulate.schedule import Op, Pass, Pipeline, run_pipelines, stage_order
from psrl.simulate.sides import Sides
from psrl.simulate.trace import make_trace
from psrl.simulate.work import Amounts, PassAmounts, shared_passes
from tests.helpers.odd_rows import odd_rows

NOTHING = Direction(0, 0, 0, 0, 0, 0, 0)
FREE = CallOverhead(0, 0, 0, 0)
LINK = Link(latency=0.25, bandwidth=100.0, collective_latency=0.5, collective_bandwidth=10.0)
MODEL = ModelSizes("four-layers", 4, 8, 2, 1, 4, 16, 10)


def calibration(**fields) -> Calibration:
    values = {
        "name": "test", "source": "estimate", "note": "", "dtype_bytes": 4, "forward": NOTHING, "backward": NOTHING,
        "shared_call": FREE, "unshared_call": FREE, "per_optimizer_parameter": 0.0, "node": LINK, "network": LINK,
        "processes_per_node": 8,
    }  # fmt: skip
    return Calibration(**{**values, **fields})


def uniform(stages: int, micro_batches: int, forward: float, backward: float, chunks: int = 1, transfer: float = 0.0):
    """Every stage takes ``forward`` and ``backward`` seconds over its chunks."""
    shape = (stages * chunks, micro_batches)
    run = Pass(np.full(shape, forward / chunks), np.full(shape, backward / chunks))
    return Pipeline((run,), stages, chunks, transfer)


# ----------------------------------------------------------------------------------------------------------- schedules
def test_order_of_1f1b():
    # Stage 1 of 3: one forward to warm up, then one forward and one backward in turn.
    assert [(op.micro_batch, op.is_backward) for op in stage_order(3, 1, 3)] == [
        (0, False), (1, False), (0, True), (2, False), (1, True), (2, True)
    ]  # fmt: skip


def test_order_of_interleaved_1f1b():
    # Two stages of two chunks, four micro-batches, last stage: 2 * 0 + 1 * 2 forwards to warm up.
    assert stage_order(2, 1, 4, 2)[:6] == [
        Op(0, 0, False), Op(1, 0, False), Op(0, 1, False), Op(0, 1, True), Op(1, 1, False), Op(1, 1, True)
    ]  # fmt: skip


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 4), (4, 8), (4, 2), (8, 64)])
def test_bubble_of_uniform_1f1b(stages, micro_batches):
    [finished] = run_pipelines([uniform(stages, micro_batches, 1.0, 2.0)])
    assert finished.seconds == pytest.approx((micro_batches + stages - 1) * 3.0)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 3)])
def test_bubble_of_uniform_interleaved_1f1b(stages, micro_batches, chunks):
    # Narayanan et al., 2021, section 2.2: the bubble shrinks by the number of chunks.
    [finished] = run_pipelines([uniform(stages, micro_batches, 1.0, 2.0, chunks)])
    assert finished.seconds == pytest.approx((micro_batches + (stages - 1) / chunks) * 3.0)


def test_forward_only_pipeline():
    [finished] = run_pipelines([Pipeline((Pass(np.full((3, 5), 2.0)),), 3)])
    assert finished.seconds == pytest.approx((5 + 3 - 1) * 2.0)
    assert finished.stage_seconds.tolist() == pytest.approx([10.0, 12.0, 14.0])


def test_transfers_delay_the_next_stage():
    # Two stages, one micro-batch: forward, transfer, forward, backward, transfer, backward.
    [finished] = run_pipelines([uniform(2, 1, 1.0, 2.0, transfer=0.5)])
    assert finished.seconds == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_a_send_waits_until_it_is_received():
    # Stage 0 forwards in 1 s each; stage 1 needs 5 s for the first, so that the second send ends at 6 s, and the third
    # forward of stage 0 begins only then.
    forward_VM = np.array([[1.0, 1.0, 1.0], [5.0, 1.0, 1.0]])
    [finished] = run_pipelines([Pipeline((Pass(forward_VM),), 2)])
    assert finished.stage_seconds.tolist() == pytest.approx([7.0, 8.0])


def test_uneven_micro_batches():
    # Stage 1: F0 from 1 to 2, B0 to 4, then F1 (3 s) and B1 (6 s); stage 0 has F1 ready at 4 and runs B0 meanwhile.
    forward_VM, backward_VM = np.array([[1.0, 3.0], [1.0, 3.0]]), np.array([[2.0, 6.0], [2.0, 6.0]])
    [finished] = run_pipelines([Pipeline((Pass(forward_VM, backward_VM),), 2)])
    assert finished.stage_seconds.tolist() == pytest.approx([4 + 3 + 6 + 6, 4 + 3 + 6])


def test_passes_follow_each_other_without_a_barrier():
    # Stage 0 begins the second pass when it is done with the first: 4 forwards of 1 s on two stages, not 3 + 3.
    two = Pipeline((Pass(np.ones((2, 2))), Pass(np.ones((2, 2)))), 2)
    assert run_pipelines([two])[0].seconds == pytest.approx(5.0)


def test_work_before_the_first_micro_batch():
    pipeline = dataclasses.replace(uniform(2, 2, 1.0, 2.0), start_seconds=10.0)
    assert run_pipelines([pipeline])[0].seconds == pytest.approx(10 + 9)
    assert pipeline.busy_seconds.tolist() == [16.0, 16.0]


def test_processes_share_cores():
    works = [Pipeline((Pass(np.array([[seconds]])),), 1) for seconds in (1.0, 1.0, 4.0)]
    alone = [finished.seconds for finished in run_pipelines(works)]
    shared = [finished.seconds for finished in run_pipelines(works, num_cores=2)]
    assert alone == [1.0, 1.0, 4.0]
    # Two cores for three until the short ones are done at 1.5 s; the long one has done 1 s of its 4.
    assert shared == pytest.approx([1.5, 1.5, 4.5])


def test_interleaving_needs_whole_groups():
    with pytest.raises(ConfigError, match="6 micro-batches do not divide into groups of 4 stages"):
        stage_order(4, 0, 6, 2)
    with pytest.raises(ConfigError, match="at least 2 stages"):
        stage_order(1, 0, 4, 2)


# --------------------------------------------------------------------------------------------------------------- costs
def test_seconds_of_a_micro_batch():
    rate = Direction(
        per_micro_batch=1.0, per_layer=0.5, per_tile=0.25, per_gemm_flop=1e-3, per_attention_flop=1e-4,
        per_output_flop=1e-5, per_cached_value=0.01, per_entropy_value=1e-2,
    )  # fmt: skip
    costs = CostModel(MODEL, ClusterLayout(2, pipeline=2), calibration(forward=rate, backward=rate))
    run = PassAmounts((Amounts(tokens=10, pairs=55, rows=3, tiles=2, path_tokens=5),), is_training=True)
    # A layer's GEMMs: 2 * 8 * 4 * (2 * 2 + 2 * 1) = 384 in attention, 2 * 3 * 8 * 16 = 768 in the MLP, a token.
    gemms = 10 * (384 + 768) * 1e-3
    attention = 55 * 4 * 2 * 4 * 1e-4
    layer = 0.5 + 2 * 0.25 + 5 * (2 * 1 * 4) * 0.01
    first, last = costs.forward(run, FREE).total[:, 0]
    assert first == pytest.approx(1.0 + 2 * (layer + gemms + attention))
    assert last - first == pytest.approx(3 * 2 * 8 * 10 * 1e-5)
    with_entropy = costs.forward(run, FREE, with_entropy=True).total[1, 0]
    assert with_entropy - last == pytest.approx(3 * 10 * 1e-2)
    back = costs.backward(run).total[0, 0]
    assert back == pytest.approx(1.0 + 2 * (layer + 2 * gemms + 2.5 * attention))
    full = dataclasses.replace(costs, recompute="full").backward(run).total[0, 0]
    assert full - back == pytest.approx(2 * (layer + gemms + attention))
    selective = dataclasses.replace(costs, recompute="selective").backward(run).total[0, 0]
    assert selective - back == pytest.approx(2 * (layer - 0.5 + attention))


def test_tensor_and_context_parallel_divide_work():
    rate = dataclasses.replace(NOTHING, per_gemm_flop=1.0, per_attention_flop=1.0, per_output_flop=1.0)
    run = PassAmounts((Amounts(8, 36, 8, 1, 0),), is_training=False)
    whole = CostModel(MODEL, ClusterLayout(1), calibration(forward=rate)).forward(run, FREE)
    split = CostModel(MODEL, ClusterLayout(4, tensor=2, context=2), calibration(forward=rate)).forward(run, FREE)
    assert split.local[0, 0] == pytest.approx(whole.local[0, 0] / 4)
    assert whole.exchange[0, 0] == 0.0
    # A layer: 4 collectives of 4 tokens * 8 values * 4 bytes (0.5 s + half of them at 10 bytes/s), K/V of 8 tokens * 8
    # values * 4 bytes: both tensor-parallel ranks have the one K/V head.
    assert split.exchange[0, 0] == pytest.approx(4 * (4 * (0.5 + 64 / 10) + 0.5 + 128 / 10))


def test_latents_are_whole_on_every_tensor_rank_and_expanded_by_every_reader():
    latent = LatentShape(query_rank=0, kv_rank=6, plain_dim=3, rotary_dim=1, value_dim=2)
    model = dataclasses.replace(MODEL, latent=latent)
    assert [model.cached_values(size) for size in (1, 2)] == [7, 7]
    assert [MODEL.cached_values(size) for size in (1, 2)] == [8, 8]
    rate = dataclasses.replace(NOTHING, per_gemm_flop=1.0)

    def seconds(path_tokens):
        run = PassAmounts((Amounts(8, 36, 0, 1, path_tokens),), is_training=False)
        return CostModel(model, ClusterLayout(2, tensor=2), calibration(forward=rate)).forward(run, FREE).local[0, 0]

    # In each of 4 layers, on half of 2 heads: 2 FLOPs * 6 * (3 + 2) a path token.
    assert seconds(5) - seconds(0) == pytest.approx(4 * 5 * 60)


def test_collectives():
    assert gather_seconds(LINK, 1, 1000) == 0.0
    assert gather_seconds(LINK, 4, 1000) == pytest.approx(0.5 * 2 + 750 / 10)
    assert all_reduce_seconds(LINK, 4, 1000) == pytest.approx(0.5 * 2 + 1500 / 10)


def test_ranks_that_exchange_tokens_run_in_step():
    def costs(local: float, experts: float) -> StageCosts:
        return StageCosts(np.array([[local]]), np.array([[experts]]), np.array([[0.5]]))

    coupled = expert_groups([costs(1.0, 4.0), costs(3.0, 2.0), costs(5.0, 0.0), costs(1.0, 2.0)], 2)
    assert [c.total[0, 0] for c in coupled] == [3 + 3 + 0.5, 3 + 3 + 0.5, 5 + 1 + 0.5, 5 + 1 + 0.5]


def test_parameters_of_named_models():
    billions = {name: round(model.num_parameters / 1e9, 1) for name, model in NAMED_MODELS.items()}
    assert billions == {
        "smollm2-135m": 0.1, "qwen2.5-0.5b": 0.5, "qwen2.5-1.5b": 1.5, "qwen2.5-3b": 3.1, "qwen2.5-7b": 7.6,
        "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2,
        "qwen3-14b": 14.8, "qwen3-32b": 32.8, "llama3-8b": 8.0, "llama3-70b": 70.6, "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235.0,
    }  # fmt: skip  # the published counts


def test_parameters_of_a_rank():
    costs = CostModel(NAMED_MODELS["qwen3-30b-a3b"], ClusterLayout(16, tensor=2, expert=8), calibration())
    dense, experts = costs.parameters_per_rank
    assert (dense + 8 * experts) * 2 == NAMED_MODELS["qwen3-30b-a3b"].num_parameters


# ------------------------------------------------------------------------------------------------------ layout, formats
def test_layout():
    layout = ClusterLayout(64, tensor=2, pipeline=4, context=2, expert=4)
    assert layout.data == 4
    assert layout.replicas_per_expert_group == 2
    assert ClusterLayout(6, pipeline=3).layers_of_stages(dataclasses.replace(MODEL, num_layers=7)) == [3, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_ranks": 6, "tensor": 4}, "6 ranks do not divide by tensor 4"),
        ({"num_ranks": 8, "expert": 16}, "expert 16 must divide"),
        ({"num_ranks": 8, "chunks": 2}, "at least 2 stages"),
        ({"num_ranks": 0}, "num_ranks must be at least 1"),
    ],
)
def test_layouts_that_do_not_fit(sizes, message):
    with pytest.raises(ConfigError, match=message):
        ClusterLayout(**sizes)


def test_calibration_file(tmp_path):
    path = tmp_path / "measured.json"
    written = calibration(num_cores=2)
    written.write(path)
    assert load_calibration(str(path)) == written
    values = json.loads(path.read_text())
    for change, message in (
        ({"format": "other"}, "expected a JSON object with format"),
        ({"dtype_bytes": -1}, "dtype_bytes must be a number that is not negative"),
        ({"node": {"latency": 1}}, r"node\.bandwidth is missing"),
        ({"speed": 1}, "speed: no such field"),
        ({"forward": 1}, "forward must be an object"),
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(InputError, match=message):
            load_calibration(str(path))
    with pytest.raises(InputError, match="presets are h100-estimate"):
        load_calibration("h200")


def test_presets_say_that_they_are_estimates():
    assert presets() == ("h100-estimate",)
    assert {load_calibration(name).source for name in presets()} == {"estimate"}


def test_model_folder(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
              "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path))
    assert (model.head_dim, model.ffn_size, model.num_experts, model.shape.ffn_size) == (16, 32, 8, 64)
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 0}))
    with pytest.raises(InputError, match="hidden_size must be a positive integer, got 0"):
        load_model(str(tmp_path))


# ------------------------------------------------------------------------------------------------------ veRL's own side
def test_partition_by_largest_differencing():
    assert balanced_partition([8, 7, 6, 5, 4], 2, equal_size=False) == [[1, 3, 4], [0, 2]]
    assert sorted(map(len, balanced_partition([9, 1, 1, 1], 2, equal_size=True))) == [2, 2]


def test_partition_is_that_of_verl():
    torch = pytest.importorskip("torch")
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    rng = np.random.default_rng(0)
    for num_parts in (1, 2, 4, 8):
        for equal_size in (True, False):
            seqlens = rng.choice([100, 200, 300, int(rng.integers(1, 5000))], 32).astype(np.int64)
            workload = calculate_workload(torch.tensor(seqlens)).tolist()
            ours = balanced_partition(workload, num_parts, equal_size=equal_size)
            assert ours == get_seqlen_balanced_partitions(workload, num_parts, equal_size)


def test_micro_batches_are_as_many_on_every_rank_and_small_at_the_ends():
    ranks = [np.array([100, 100, 100, 100]), np.array([10, 10, 10, 10])]
    first, second = upstream_micro_batches(ranks, 100)
    assert [part.tolist() for part in first] == [[1], [3], [2], [0]]
    assert [len(part) for part in second] == [1, 1, 1, 1]
    [parts] = upstream_micro_batches([np.array([50, 300, 40, 60])], 100)  # a row is never split
    assert sorted(int(np.array([50, 300, 40, 60])[part].sum()) for part in parts) == [150, 300]
    assert len(upstream_micro_batches([np.full(6, 100)], 300, multiple=4)[0]) == 4
    with pytest.raises(ConfigError, match="cannot cut 1 rows of a rank into 2 micro-batches"):
        upstream_micro_batches([np.array([100, 100]), np.array([10])], 100)


def test_order_of_rows_is_rank_major():
    assert sorted(upstream_order(np.array([400, 100, 300, 200]), 2).reshape(2, 2).tolist()) == [[0, 1], [2, 3]]


# --------------------------------------------------------------------------------------------------------- whole step
def chain(uid: str, steps: int, first: int, more: int) -> list[ReplaySample]:
    """Step-wise samples of one trajectory; the last ``more`` tokens of each are targets."""
    found = []
    for step in range(steps):
        length = first + step * more
        ids = np.arange(length, dtype=np.int64)
        ids[0] = 1000 + int(uid)
        found.append(
            ReplaySample(
                where=f"{uid}:{step}",
                input_ids_N=ids,
                loss_mask_N=np.arange(length) >= length - more,
                position_ids_N=np.arange(length),
                advantages_M=np.ones(more),
                old_log_probs_M=None,
                uid=uid,
                session=uid,
                index=step,
            )
        )
    return found


def step_of(num_ranks: int, fields: dict | None = None, max_tokens: int = 64, **layout: int) -> Simulation:
    rate = Direction(0.001, 0.0001, 0.0, 1e-9, 1e-9, 1e-9, 0.0)
    link = Link(1e-6, 1e9, 1e-6, 1e9)
    used = calibration(forward=rate, backward=rate, **{"node": link, "network": link, **(fields or {})})
    shape = ClusterLayout(num_ranks, **layout)
    samples = [sample for uid in range(8) for sample in chain(str(uid), 4, 40, 10)]
    trace = make_trace(samples, multiple=shape.data * 2)
    return simulate(Sides(trace, MODEL, shape, 4, 2, max_tokens, max_tokens), used)


def test_trace_is_repeated_and_padded():
    trace = make_trace(chain("0", 3, 10, 5), multiple=4, replicas=2)
    assert trace.num_rows == 8
    assert trace.is_padding_S.tolist() == [False] * 6 + [True] * 2
    assert trace.num_tokens == 2 * (10 + 15 + 20)
    first, copy = trace.token_rows()[0], trace.token_rows()[3]
    assert not set(first.tolist()) & set(copy.tolist())


def test_amounts_of_a_plan_are_those_of_its_tree():
    trace = make_trace(chain("0", 4, 40, 10), multiple=1)
    from psrl.cost import KVFootprint

    footprint = KVFootprint.of_layers(4, 1, 4, 4)
    plan = build_plan(trace.samples, max_tokens=32, shape=MODEL.shape, footprint=footprint)
    pass1, pass2 = shared_passes(plan)
    assert sum(amounts.tokens for amounts in pass2.micro_batches) == 70
    assert sum(amounts.pairs for amounts in pass2.micro_batches) == 70 * 71 // 2
    assert sum(amounts.tokens for amounts in pass1.micro_batches) == plan.stats.spine_tokens == 38
    assert (pass1.is_training, pass2.is_training) == (False, True)


def test_placement_is_never_slower_than_that_of_verl():
    for rows in odd_rows(30):
        sides = Sides(make_trace(rows, multiple=4), MODEL, ClusterLayout(4), 4, 1, 64, 64)
        segments = sides.segments()
        ours, upstream = sides.shared(segments).placement, sides.unshared(segments).placement
        assert ours.critical_path <= upstream.critical_path * (1 + 1e-9)


def test_shares_of_a_phase_add_up():
    for layout in ({}, {"pipeline": 2}, {"pipeline": 2, "chunks": 2}, {"tensor": 2, "context": 2}):
        for side in step_of(8, **layout).sides.values():
            for phase in side.phases.values():
                parts = [phase.compute, phase.exchange, phase.bubble, phase.contention, phase.wait, phase.gradients]
                assert sum(parts) + phase.optimizer == pytest.approx(1.0)
                assert min(parts) >= -1e-12
                assert 0.0 < phase.balance <= 1.0


def test_sharing_wins_by_what_it_does_not_compute():
    ours, theirs = (step_of(1, max_tokens=1000).sides[side].phases for side in ("psrl", "verl"))
    # 8 trajectories of 40 + 50 + 60 + 70 tokens, 70 of them distinct; work is almost all in the tokens.
    assert theirs["ref"].processor_seconds[0] / ours["ref"].processor_seconds[0] == pytest.approx(220 / 70, rel=0.2)


def test_cores_bound_the_step():
    alone, crowded = step_of(4).sides["verl"], step_of(4, {"num_cores": 1}).sides["verl"]
    update, slow = alone.phases["update"], crowded.phases["update"]
    communication = update.gradients * update.seconds
    assert slow.seconds - communication == pytest.approx(update.processor_seconds.sum(), rel=1e-6)
    assert slow.contention > 0.5
    assert update.contention == 0.0


def test_experts_add_exchanges_and_dummies():
    moe = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2)
    samples = chain("0", 6, 200, 20) + chain("1", 2, 10, 5)
    rate = dataclasses.replace(NOTHING, per_gemm_flop=1e-9)
    used = calibration(forward=rate, backward=rate)
    results = {}
    for expert in (1, 2):
        trace = make_trace(samples, multiple=2)
        sides = Sides(trace, moe, ClusterLayout(2, expert=expert), 4, 1, 64, 64)
        results[expert] = simulate(sides, used, "on").sides["psrl"].phases["update"]
    assert results[1].exchange == 0.0
    assert results[2].exchange > 0.0
    assert results[2].num_micro_batches >= results[1].num_micro_batches
    assert results[2].num_micro_batches % 2 == 0


def test_memory_shrinks_with_the_layout():
    whole, split = step_of(2).sides["psrl"].memory, step_of(4, tensor=2).sides["psrl"].memory
    assert split.weights * 2 == whole.weights
    assert split.activations < whole.activations
    assert step_of(2).sides["verl"].memory.kv_cache == 0


# --------------------------------------------------------------------------------------------------------- command line
def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "psrl.cli.main", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def write_trace(path) -> None:
    rows = [
        {"uid": s.uid, "session": s.session, "index": s.index, "input_ids": s.input_ids_N.tolist(),
         "loss_mask": s.loss_mask_N.astype(int).tolist()}
        for uid in range(4) for s in chain(str(uid), 4, 40, 10)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_command(tmp_path):
    write_trace(tmp_path / "trace.jsonl")
    result = run_cli(
        tmp_path / "trace.jsonl", "--ranks", 16, "--tp", 2, "--pp", 2, "--replicas", 2, "--json", tmp_path / "out.json"
    )
    assert result.returncode == 0, result.stderr
    assert "TP 2 x CP 1 x PP 2 x DP 4" in result.stdout
    assert "h100-estimate (estimate)" in result.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["rows"], record["padding_rows"], record["tokens"]) == (32, 0, 2 * 4 * 220)
    assert record["sides"]["psrl"]["tokens_computed"] == 2 * 4 * 70
    assert record["speedup"]["step"] > 0
    for side in record["sides"].values():
        assert side["memory"]["fits"] is True
        assert side["step_seconds"] == pytest.approx(sum(phase["seconds"] for phase in side["phases"].values()))


def test_public_options_are_these():
    import typer

    from psrl.cli.main import app

    params = typer.main.get_command(app).commands["simulate"].params  # type: ignore[attr-defined]
    names = sorted(name for param in params for name in (param.opts or [param.name]) if name != "--help")
    assert names == [
        "--calibration", "--cp", "--distributed-optimizer", "--ep", "--infer-max-tokens", "--json", "--kv-cache-bytes",
        "--limit", "--max-tokens", "--mini-batches", "--mode", "--model", "--pp", "--ranks", "--recompute",
        "--replicas", "--sharing", "--tokenizer", "--tp", "--vpp", "files",
    ]  # fmt: skip


def test_command_names_what_is_wrong(tmp_path):
    write_trace(tmp_path / "trace.jsonl")
    for arguments, message in (
        (("--ranks", 6, "--tp", 4), "6 ranks do not divide by tensor 4"),
        (("--ranks", 512), "raise --replicas"),
        (("--ep", 8), "expert 8 must divide the 0 experts of qwen3-8b"),
        (("--model", tmp_path), "cannot read"),
    ):
        result = run_cli(tmp_path / "trace.jsonl", *arguments)
        assert result.returncode == 2
        assert message in " ".join(result.stderr.split())
