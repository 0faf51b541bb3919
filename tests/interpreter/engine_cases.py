"""An engine whose attention reads the cached path in its blocks, in Triton's interpreter.

``tests/integration/test_path_in_place.py`` runs this file in a process with TRITON_INTERPRET=1. In float32 it is
compared with veRL's own path, which shares nothing, and with engines that gather the path.
"""

import functools

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.systems import SYSTEMS
from tests.helpers import hf_truth, make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, degenerate_rows, step_rows, tree_rows
from tests.helpers.in_place import gather_path, watched
from tests.helpers.parallel import Layout
from tests.helpers.parallel_checks import check
from tests.helpers.ranks import RankPool

LOSS = ppo_loss_fn(entropy_coeff=0.1)
LAYERS, HEAD_DIM = 2, 16
SMALL = {"step": lambda: step_rows(1, 3), "tree": lambda: tree_rows(2), "degenerate": degenerate_rows}
SINGLE = {"dtype": torch.float32, "calculate_entropy": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(heads, kv_heads):
        folder = tmp_path_factory.mktemp("qwen3")
        return make_checkpoint(folder, "qwen3", layers=LAYERS, head_dim=HEAD_DIM, heads=heads, kv_heads=kv_heads)

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(backend, heads=(2, 1), recompute=None, dtype="float32", system="psrl", gathers=False):
        psrl = PSRLConfig(enable=backend is not None, attention_backend=backend or "auto")
        made = make_worker(checkpoint(*heads), psrl=psrl, dtype=dtype, recompute=recompute, sharing_system=system)
        return gather_path(made) if gathers else made

    return make


def check_equal(outcome, other, tolerance=1e-5):
    assert max(relative_errors(outcome.grads, other.grads).values()) <= tolerance
    assert outcome.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)
    for kind in ("log_probs", "entropy"):
        for got, want in zip(outcome.model_output[kind], other.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def check_nothing_is_gathered(watch):
    """Tables are built once an execution and dropped with it, not once a layer; nobody reads or adds what is copied."""
    num_backwards = len(watch.backwards_with_path)
    assert watch.executions_with_path >= num_backwards > 0
    assert watch.calls == {
        "path_blocks": watch.executions_with_path,
        "path_grads": num_backwards,
        "drop": watch.executions_with_path,
    }
    assert watch.accumulator_dtypes == {torch.float32}


def check_engine(worker, rows, budget, chain, **options):
    wanted = run_update(worker(None, options["heads"]), rows, LOSS, max_tokens=1000, **SINGLE)
    with watched() as watch:
        outcome = run_update(worker("triton", **options), rows, LOSS, max_tokens=budget, **SINGLE)
    check_nothing_is_gathered(watch)
    assert watch.longest_chain == chain
    assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    check_equal(outcome, wanted)
    with watched() as watch:
        gathered = run_update(worker("sdpa", **options), rows, LOSS, max_tokens=budget, **SINGLE)
    assert watch.calls.keys() == {"read", "add_grads"}
    check_equal(outcome, gathered)


@pytest.mark.parametrize(
    ("forest", "budget", "recompute", "chain"),
    [("step", 8, None, 3), ("tree", 10, "full", 3), ("degenerate", 2, "selective", 2)],
)
def test_equals_independent_samples_and_gathered_paths(worker, forest, budget, recompute, chain):
    check_engine(worker, SMALL[forest](), budget, chain, heads=(2, 1), recompute=recompute)


def test_bit_equal_to_the_same_kernels_on_a_gathered_path_which_takes_more_memory(worker):
    """A layer saves K and V of the path for its backward where it gathers them, and nothing of it otherwise."""
    rows, kv_heads = degenerate_rows(), 1
    with watched() as in_place:
        outcome = run_update(worker("triton", (2, kv_heads)), rows, LOSS, max_tokens=3, **SINGLE)
    with watched() as gathered:
        other = run_update(worker("triton", (2, kv_heads), gathers=True), rows, LOSS, max_tokens=3, **SINGLE)
    check_nothing_is_gathered(in_place)
    assert all(torch.equal(grad, other.grads[name]) for name, grad in outcome.grads.items())
    assert in_place.backwards_with_path == gathered.backwards_with_path == [3, 3]
    bytes_per_token = kv_heads * (HEAD_DIM + HEAD_DIM) * 4
    assert gathered.saved_bytes - in_place.saved_bytes == LAYERS * 6 * bytes_per_token


def test_forward_only(worker):
    rows = degenerate_rows()
    with watched() as watch:
        outcome = run_inference(worker("triton"), rows, max_tokens=1, **SINGLE)
    assert watch.calls == {"path_blocks": watch.executions_with_path, "drop": watch.executions_with_path}
    assert watch.executions_with_path == 6 and watch.longest_chain == 4
    assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    wanted = run_inference(worker(None), rows, max_tokens=1000, **SINGLE)
    for kind, values in outcome.model_output.items():
        for got, want in zip(values, wanted.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize(("forest", "budget", "chain"), [("step", 5, 7), ("tree", 5, 6), ("degenerate", 1, 4)])
def test_every_recompute(worker, forest, budget, chain, recompute):
    check_engine(worker, FORESTS[forest](), budget, chain, heads=(4, 2), recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "psrl"])
def test_every_system(worker, system):
    """Blocks with more room than tokens, blocks that are kept, leaves that are stored."""
    rows = tree_rows(2)
    wanted = run_update(worker(None), rows, LOSS, max_tokens=1000, **SINGLE)
    with watched() as watch:
        outcome = run_update(worker("triton", system=system), rows, LOSS, max_tokens=8, **SINGLE)
    check_equal(outcome, wanted)
    assert outcome.report.kv_bytes_measured == outcome.report.stats.kv_bytes_peak
    if system != "tree_packing":
        check_nothing_is_gathered(watch)


@pytest.mark.slow
def test_bfloat16_loses_no_more_than_gathered_paths(checkpoint, worker):
    """Error of all gradients against float32. Accumulators are float32, and what is added to them is not rounded."""
    rows = tree_rows()
    truth = hf_truth(checkpoint(4, 2), rows, LOSS, dtype=torch.float32, calculate_entropy=True)

    def error(outcome):
        return (
            sum(float((outcome.grads[n].double() - g.double()).square().sum()) for n, g in truth.grads.items()) ** 0.5
        )

    options = {"heads": (4, 2), "dtype": "bfloat16"}
    with watched() as watch:
        in_place = run_update(worker("triton", **options), rows, LOSS, max_tokens=6, **SINGLE)
    check_nothing_is_gathered(watch)
    gathered = run_update(worker("triton", gathers=True, **options), rows, LOSS, max_tokens=6, **SINGLE)
    unshared = run_update(worker(None, **options), rows, LOSS, max_tokens=1000, **SINGLE)
    errors = [error(x) for x in (in_place, gathered, unshared)]
    assert errors[0] <= 1.1 * errors[2] and errors[0] <= 1.1 * errors[1], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "forest", "recompute"),
    [
        (Layout(tp=2, pp=2), "degenerate", "full"),  # sequence parallelism: micro-batches with padding
        (Layout(pp=2, vpp=2), "tree", None),
        (Layout(tp=2, cp=2), "degenerate", None),  # gathers
    ],
    ids=["tp-pp-full", "vpp", "tp-cp"],
)
def test_layouts(tmp_path, layout, forest, recompute):
    pool = RankPool(4, tmp_path)
    options = {"psrl": {"attention_backend": "triton"}, "engine": {"recompute": recompute}, "adam": False}
    folder = make_checkpoint(tmp_path / "model", "qwen3", layers=4, head_dim=HEAD_DIM)
    budget = 3 // layout.cp  # of one rank
    try:
        results, _ = check(
            pool, layout, forest=forest, dtype="float32", checkpoint=folder, budgets=(budget,), **options
        )
    finally:
        pool.close()
    for result in results:
        assert result.reports[budget].kv_bytes_measured == result.reports[budget].stats.kv_bytes_peak > 0
