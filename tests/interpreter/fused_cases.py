"""``use_fused_kernels`` with veRL's real kernels in Triton's interpreter, in float32.

``test_path_in_place.py`` and ``test_fused_kernels.py`` run this file in a process with TRITON_INTERPRET=1. Per edge,
log-probs, entropies and gradients are compared with ``edge_log_probs`` in float64; then whole engines with the same
engine without the kernels, with veRL's own path, which shares nothing, and with that path with the same kernels.

Shape legend: R rows, E edges, D hidden, V vocabulary.
"""

import functools

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.integrations.verl.engine.edge_outputs import fused_edge_log_probs
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import FORESTS, degenerate_rows, step_rows, tree_rows
from tests.helpers.fused import BRANCHING, edge_errors, kernels_on_cpu, relative_error, run_fused_job
from tests.helpers.megatron_bridge import import_megatron_bridge
from tests.helpers.parallel import Job, Layout, reference
from tests.helpers.parallel_checks import check_job
from tests.helpers.ranks import RankPool

LOSS = ppo_loss_fn(entropy_coeff=0.1)
HIDDEN = 128
SINGLE = {"dtype": torch.float32, "calculate_entropy": True}


@pytest.mark.parametrize(
    ("rows", "vocab", "temperature"),
    [
        (BRANCHING, 300, 0.7),  # a tile that the vocabulary does not fill
        pytest.param([0], 130, 0.5, marks=pytest.mark.slow),
        pytest.param(BRANCHING, 2100, 1.0, marks=pytest.mark.slow),  # three splits of the forward
        pytest.param(BRANCHING, 9600, 1.3, marks=pytest.mark.slow),  # two of the backward
        pytest.param(sorted([*range(140), *range(0, 140, 7)]), 300, 1.0, marks=pytest.mark.slow),  # two tiles of rows
    ],
)  # fmt: skip
def test_edges_equal_those_of_logits_in_float64(rows, vocab, temperature):
    with kernels_on_cpu() as shapes:
        errors = edge_errors(rows, vocab, temperature, torch.float32)
    assert shapes == [(max(2, len(rows)), HIDDEN)]
    assert max(errors.values()) <= 1e-5, errors


def test_no_edges_reach_no_kernel():
    hidden = torch.randn(1, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    with kernels_on_cpu() as shapes:
        log_probs, entropy = fused_edge_log_probs(hidden, torch.randn(8, HIDDEN), 1.0, none, none)
    assert shapes == [] and log_probs.shape == entropy.shape == (0,)
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), hidden)
    assert not grad.any()


def test_rows_that_were_widened_are_computed_in_the_weights_dtype():
    """A 16-bit model returns its last stage's output in float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, HIDDEN).bfloat16(), 0.3 * torch.randn(130, HIDDEN).bfloat16()
    rows, labels = torch.tensor([0, 1, 1, 2]), torch.tensor([3, 129, 0, 64])
    wide = hidden.float().requires_grad_()
    with kernels_on_cpu():
        log_probs, _ = fused_edge_log_probs(wide, weight, 1.0, rows, labels)
        (grad,) = torch.autograd.grad((log_probs * torch.arange(1.0, 5.0)).sum(), wide)
    exact = hidden.double().requires_grad_()
    want = (exact @ weight.double().T).log_softmax(-1)[rows, labels]
    (want_grad,) = torch.autograd.grad((want * torch.arange(1.0, 5.0)).sum(), exact)
    assert log_probs.dtype == grad.dtype == torch.float32 and relative_error(log_probs, want) <= 1e-5
    assert relative_error(grad, want_grad) <= 1e-2


# ---------------------------------------------------------------------------------------------------------- engines
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(tied):
        return make_checkpoint(
            tmp_path_factory.mktemp("model"), "qwen3", tied, vocab=130, hidden=HIDDEN, head_dim=16, layers=2
        )

    return make


@pytest.fixture(scope="module")
def worker(checkpoint):
    @functools.cache
    def make(tied, shares, fused, recompute=None, dtype="float32", ddp=()):
        with kernels_on_cpu():
            return make_worker(
                checkpoint(tied),
                psrl=PSRLConfig(enable=shares),
                dtype=dtype,
                recompute=recompute,
                model={"use_fused_kernels": fused},
                override_ddp_config=dict(ddp),
            )

    return make


def check_equal(outcome, other, tolerance=1e-5):
    errors = relative_errors(outcome.grads, other.grads)
    assert max(errors.values()) <= tolerance, errors
    check_outputs(outcome, other, tolerance)
    assert outcome.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)


def check_outputs(outcome, other, tolerance=1e-5):
    for kind in ("log_probs", "entropy"):
        for got, want in zip(outcome.model_output[kind], other.model_output[kind], strict=True):
            assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def update(worker, rows, budget, **options):
    with kernels_on_cpu() as shapes:
        outcome = run_update(worker, rows, LOSS, max_tokens=budget, **{**SINGLE, **options})
    return outcome, shapes


def check_engine(worker, rows, budget, tied, recompute=None):
    outcome, shapes = update(worker(tied, True, True, recompute), rows, budget)
    plain, none = update(worker(tied, True, False, recompute), rows, budget)
    assert shapes and none == []
    check_equal(outcome, plain)
    unshared, _ = update(worker(tied, False, False), rows, 1000)
    check_equal(outcome, unshared)
    return shapes


@pytest.mark.parametrize(
    ("forest", "budget", "tied", "shapes"),
    [
        # The spine's 3 rows with 4 edges, two leaves with one edge each, the spine again.
        ("degenerate", 3, False, [(4, HIDDEN), (2, HIDDEN), (2, HIDDEN), (4, HIDDEN)]),
        ("tree", 1000, True, [(38, HIDDEN)]),  # 31 rows
    ],
)
def test_equals_logits_and_independent_samples(worker, forest, budget, tied, shapes):
    assert check_engine(worker, FORESTS[forest](), budget, tied) == shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forest", "budget", "tied", "recompute"),
    [
        ("step", 5, True, None),
        ("step", 20, False, "full"),
        ("tree", 5, False, "selective"),
        ("tree", 20, True, "full"),
        ("degenerate", 2, True, None),
        ("degenerate", 1000, False, None),
    ],
)
def test_more_forests(worker, forest, budget, tied, recompute):
    check_engine(worker, FORESTS[forest](), budget, tied, recompute)


def test_forward_only(worker):
    rows = degenerate_rows()
    want = run_inference(worker(False, True, False), rows, max_tokens=3, temperature=0.7, **SINGLE)
    with kernels_on_cpu() as shapes:
        got = run_inference(worker(False, True, True), rows, max_tokens=3, temperature=0.7, **SINGLE)
    assert shapes == [(4, HIDDEN), (2, HIDDEN), (2, HIDDEN)]
    check_outputs(got, want)


@pytest.mark.slow
def test_without_entropy_and_with_a_temperature(worker):
    rows, loss = tree_rows(2), ppo_loss_fn()
    options = {"max_tokens": 6, "dtype": torch.float32, "temperature": 0.7}
    with kernels_on_cpu():
        got = run_update(worker(False, True, True), rows, loss, **options)
    want = run_update(worker(False, False, False), rows, loss, **{**options, "max_tokens": 1000})
    assert got.model_output.keys() == {"log_probs"}
    assert max(relative_errors(got.grads, want.grads).values()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_equals_verls_own_path_with_the_same_kernels(worker, tied):
    rows = step_rows(1, 4)
    want, unshared = update(worker(tied, False, True), rows, 1000)
    got, _ = update(worker(tied, True, True), rows, 9)
    assert unshared == [(sum(len(row.input_ids) for row in rows), HIDDEN)]
    check_equal(got, want)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_weights_gradient_is_ready_in_a_last_micro_batch_without_an_edge(worker, tied):
    """With ``overlap_grad_reduce`` Megatron-Core waits for every parameter's gradient in the last micro-batch, here the
    spine's first, of a prompt. Twice, as it learns in the first mini-batch which parameters there are."""
    rows = step_rows(1, 2)
    overlapping = worker(tied, True, True, ddp=(("overlap_grad_reduce", True),))
    want, _ = update(worker(tied, True, False), rows, 6)
    for _ in range(2):
        got, shapes = update(overlapping, rows, 6)
        assert shapes == [(4, HIDDEN), (3, HIDDEN), (4, HIDDEN)]  # of five micro-batches
        check_equal(got, want)


@pytest.mark.slow
def test_bfloat16_loses_no_more_than_logits(checkpoint, worker):
    """Error of all gradients against float32 logits."""
    rows = tree_rows() + step_rows()
    truth, _ = update(worker(False, True, False), rows, 6)

    def error(outcome):
        return sum(float((outcome.grads[n].double() - g.double()).square().sum()) for n, g in truth.grads.items())

    fused, _ = update(worker(False, True, True, dtype="bfloat16"), rows, 6)
    logits, _ = update(worker(False, True, False, dtype="bfloat16"), rows, 6)
    unshared, _ = update(worker(False, False, True, dtype="bfloat16"), rows, 1000)
    errors = [error(outcome) ** 0.5 for outcome in (fused, logits, unshared)]
    assert errors[0] <= 1.1 * errors[1] and errors[0] <= 1.1 * errors[2], errors


@pytest.mark.slow
def test_beside_adapters_with_a_weight_that_is_not_trained(checkpoint):
    import_megatron_bridge()
    lora = {"lora": {"type": "lora", "rank": 3, "alpha": 6, "dropout": 0.0, "merge": False}}
    built = {
        "vanilla_mbridge": False,
        "override_transformer_config": {"apply_rope_fusion": False, "attention_backend": "auto"},
    }
    options = {"budgets": (4, 1000), "dtype": "float32", "adam": False}
    plain, fused = (
        Job(
            checkpoint(False),
            [step_rows(1, 3)],
            engine={"model": {**lora, "use_fused_kernels": on}, **built},
            **options,
        )
        for on in (False, True)
    )
    check_job(fused, [run_fused_job(fused, Layout())], reference(plain, "fused adapters"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tied", "engine"),
    [
        (Layout(tp=2), False, {}),  # with sequence parallelism
        (Layout(tp=2), True, {"sequence_parallel": False}),
        (Layout(pp=2), True, {}),
        (Layout(cp=2), False, {}),
    ],
    ids=["tp-sp", "tp-tied", "pp-tied", "cp"],
)
def test_layouts(tmp_path, checkpoint, layout, tied, engine):
    rows = step_rows(1, 4)
    plain = Job(checkpoint(tied), [rows], budgets=(5, 1000), dtype="float32", adam=False)
    want = reference(plain, f"fused {tied}")
    fused = Job(
        checkpoint(tied), [rows], budgets=(5, 1000), dtype="float32", adam=False,
        engine={"model": {"use_fused_kernels": True}, **engine},
    )  # fmt: skip
    pool = RankPool(2, tmp_path)
    try:
        check_job(fused, pool.run(run_fused_job, fused, layout), want, 1e-5)
    finally:
        pool.close()
