"""Log-probs and entropies of edges against plain autograd, and the loss ledger."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from psrl.errors import LossError, PlanError
from psrl.runtime.loss import LossLedger
from psrl.runtime.outputs import RowChunk, VocabShard, chunked_edge_log_probs, edge_log_probs, row_chunks
from psrl.types import Edges

WHOLE = VocabShard(0, None)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_edge_log_probs_equal_autograd(with_entropy):
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    rows, labels = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 6, 0, 3])
    weights, entropy_weights = torch.randn(2, 4, dtype=torch.float64)

    log_probs, entropy = edge_log_probs(logits, temperature, rows, labels, shard=WHOLE, with_entropy=with_entropy)
    scalar = (log_probs * weights).sum() + ((entropy * entropy_weights).sum() if with_entropy else 0.0)
    (grad,) = torch.autograd.grad(scalar, logits)

    reference = (logits / temperature[:, None]).log_softmax(-1)
    want = reference[rows, labels]
    want_entropy = -(reference.exp() * reference).sum(-1)[rows]
    wanted = (want * weights).sum() + ((want_entropy * entropy_weights).sum() if with_entropy else 0.0)
    (want_grad,) = torch.autograd.grad(wanted, logits)
    assert torch.allclose(log_probs, want, atol=1e-14) and torch.allclose(grad, want_grad, atol=1e-14)
    assert entropy is None if not with_entropy else torch.allclose(entropy, want_entropy, atol=1e-14)


def test_gradients_of_a_row_sum_to_zero_in_float32():
    """Probabilities are normalised, not exponentials of rounded log-probs: the error would be 1e-6 and of one sign."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, 50_000) + 20).requires_grad_()
    rows, labels = torch.arange(64), torch.randint(0, 50_000, (64,))
    log_probs, _ = edge_log_probs(logits, None, rows, labels, shard=WHOLE, with_entropy=False)
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    assert grad.double().sum(-1).abs().max() < 3e-7
    assert torch.allclose(log_probs.double(), logits.double().log_softmax(-1)[rows, labels], rtol=1e-6)


def test_impossible_tokens_have_no_nan():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    log_probs, entropy = edge_log_probs(
        logits, None, torch.tensor([0]), torch.tensor([2]), shard=WHOLE, with_entropy=True
    )
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    assert torch.isfinite(entropy).all() and torch.isfinite(grad).all() and grad[0, 1] == 0


def test_half_precision_logits_are_computed_in_float32():
    logits = torch.randn(2, 5, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = edge_log_probs(logits, None, torch.tensor([0, 1]), torch.tensor([1, 2]), shard=WHOLE,
                                  with_entropy=False)  # fmt: skip
    assert log_probs.dtype == torch.float32
    assert torch.allclose(log_probs, logits.float().log_softmax(-1)[[0, 1], [1, 2]])
    (grad,) = torch.autograd.grad(log_probs.sum(), logits)
    assert grad.dtype == torch.bfloat16


def test_chunks_of_rows_and_their_edges():
    edge_rows = np.asarray([0, 0, 1, 3, 3, 4])
    assert row_chunks(edge_rows, 5, 2) == (
        RowChunk(slice(0, 2), slice(0, 3)),
        RowChunk(slice(2, 4), slice(3, 5)),
        RowChunk(slice(4, 5), slice(5, 6)),
    )
    assert row_chunks(edge_rows[:0], 1, 1) == (RowChunk(slice(0, 1), slice(0, 0)),)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 9])
def test_chunked_equal_all_at_once(max_rows):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    temperature = torch.rand(5, dtype=torch.float64) + 0.5
    edge_rows, labels = np.asarray([0, 0, 1, 3, 3, 4]), torch.tensor([1, 6, 0, 3, 5, 2])
    args = (temperature, torch.from_numpy(edge_rows), labels)
    calls = []

    def project(x):
        calls.append(len(x))
        return x @ weight.T

    whole = edge_log_probs(hidden @ weight.T, *args, shard=WHOLE, with_entropy=True)
    parts = chunked_edge_log_probs(
        hidden, project, *args, row_chunks(edge_rows, 5, max_rows), shard=WHOLE, with_entropy=True
    )
    for want, got in zip(whole, parts, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-15)
    want, got = (
        torch.autograd.grad((a * labels).sum() + b.square().sum(), (hidden, weight)) for a, b in (whole, parts)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert max(calls) <= max_rows and sum(calls) == 2 * 5  # once more in the backward


CPU = torch.device("cpu")
EDGES = Edges(
    source_E=np.asarray([0, 1]),
    label_E=np.asarray([5, 6]),
    temperature_E=np.ones(2),
    target_edges_M=np.asarray([0, 1, 0]),
    target_positions_M=np.asarray([0, 1, 3]),
    cu_targets=np.asarray([0, 2, 3]),
)
"""Two samples of three and two tokens that share their first edge."""
UNSHARED = dataclasses.replace(
    EDGES,
    source_E=np.asarray([0, 1, 2]),
    label_E=np.asarray([5, 5, 6]),
    temperature_E=np.ones(3),
    target_edges_M=np.asarray([1, 2, 0]),
)
"""The same targets in a plan that computes the first token for each sample."""


def make_ledger(kinds=("log_probs",), dtype=torch.float64, **options):
    return LossLedger(EDGES, np.asarray([0, 3, 5]), kinds=kinds, dtype=dtype, device=CPU, **options)


def without_metrics(loss):
    return lambda samples, outputs: (loss(outputs), {})


def test_shared_edges_collect_the_cotangents_of_their_samples():
    ledger = make_ledger()
    ledger.outputs["log_probs"][:] = torch.tensor([0.5, 2.0])
    seen = []

    def loss(samples, outputs):
        seen.append((samples.tolist(), outputs["log_probs"]))
        return outputs["log_probs"].values().square().sum(), {}

    ledger.complete(np.asarray([1]), loss)
    assert seen[0][0] == [1] and seen[0][1].unbind()[0].tolist() == [0.5, 0.0]
    assert ledger.cotangents["log_probs"].tolist() == [1.0, 0.0]
    ledger.complete(np.asarray([0]), loss)
    assert seen[1][1].unbind()[0].tolist() == [0.5, 2.0, 0.0]
    assert ledger.cotangents["log_probs"].tolist() == [2.0, 4.0]
    ledger.complete(np.asarray([], dtype=np.int64), loss)
    assert len(seen) == 2
    assert ledger.check_separable(without_metrics(lambda x: x["log_probs"].values().square().sum()), 1e-9).loss == 4.5


def test_outputs_that_the_loss_ignores_have_no_cotangent():
    ledger = make_ledger(("log_probs", "entropy"))
    ledger.complete_all(without_metrics(lambda outputs: outputs["entropy"].values().sum()))
    assert ledger.cotangents["log_probs"].tolist() == [0.0, 0.0]
    assert ledger.cotangents["entropy"].tolist() == [2.0, 1.0]
    whole = ledger.complete_all(lambda samples, outputs: (torch.tensor(3.0), {"a": 1}))
    assert whole == (3.0, {"a": 1})


def test_another_plan_of_the_same_samples_gets_outputs_and_cotangents_by_target():
    ledger = make_ledger()
    ledger.outputs["log_probs"][:] = torch.tensor([0.5, 2.0])
    ledger.complete_all(without_metrics(lambda x: (x["log_probs"].values() * torch.tensor([1.0, 2, 9, 3, 9])).sum()))
    assert ledger.cotangents["log_probs"].tolist() == [4.0, 2.0]
    carried = ledger.for_edges(UNSHARED)
    assert carried.outputs["log_probs"].tolist() == [0.5, 0.5, 2.0]
    assert carried.cotangents["log_probs"].tolist() == [3.0, 1.0, 2.0]
    assert carried.for_edges(EDGES).cotangents["log_probs"].tolist() == [4.0, 2.0]


def test_a_ledger_refuses_other_targets_and_micro_batches_of_other_plans():
    ledger = make_ledger()
    for other in (
        dataclasses.replace(EDGES, target_positions_M=np.asarray([0, 1, 2])),
        dataclasses.replace(EDGES, cu_targets=np.asarray([0, 1, 3])),
    ):
        with pytest.raises(PlanError, match="other targets"):
            ledger.for_edges(other)
    stranger = SimpleNamespace(edges=UNSHARED, edges_E=torch.tensor([0]))
    for call in (ledger.record, ledger.surrogate):
        with pytest.raises(PlanError, match="micro-batch of another"):
            call(stranger, {"log_probs": torch.ones(1)})


def test_what_is_not_computed_is_nan_where_somebody_may_read_it():
    assert [x.isnan().tolist() for x in make_ledger().sample_outputs()["log_probs"].unbind()] == [
        [False, False, True], [False, True],
    ]  # fmt: skip
    with pytest.raises(LossError, match=r"not finite.*nan: outputs that are not computed are NaN"):
        make_ledger(absent=float("nan")).complete_all(without_metrics(lambda x: x["log_probs"].values().sum()))
    assert make_ledger().evaluate_all(without_metrics(lambda x: x["log_probs"].values().sum())).loss == 0.0


def completed(ledger, evaluate):
    for sample in range(2):
        ledger.complete(np.asarray([sample]), evaluate)
    return ledger


def test_a_coupled_loss_is_found_though_its_values_cancel():
    """A mean over samples, with weights +1 and -1: 0 alone and together, its derivatives half as large together."""
    signs = {3: 1.0, 2: -1.0}

    def loss(samples, outputs):
        rows = outputs["log_probs"].unbind()
        return torch.stack([signs[len(row)] * (row[0] - 1.0) for row in rows]).mean(), {}

    ledger = make_ledger()
    ledger.outputs["log_probs"][:] = 1.0
    completed(ledger, loss)
    with pytest.raises(LossError, match=r"log_probs of sample 0 has norm 1 .*alone, and 0.5 with the whole"):
        ledger.check_separable(loss, 1e-4)


def test_summands_that_cancel_are_no_coupling():
    """Two sums of 2e6 in float32 of which the last digits differ with the order of addition."""

    def loss(samples, outputs):
        weights = {3: 2e6, 2: -1.999999e6}
        return sum(row.sum() * weights[len(row)] for row in outputs["log_probs"].unbind()), {}

    ledger = make_ledger(dtype=torch.float32)
    ledger.outputs["log_probs"][:] = torch.tensor([1.1, 0.3])
    assert abs(completed(ledger, loss).check_separable(loss, 1e-4).loss) < 1e6


def test_rounding_at_a_minimum_is_no_coupling():
    """A penalty at its minimum has derivatives of rounding errors only, which may all differ."""
    reference = torch.tensor([-1.0, -2.0, 0.0, -1.0, 0.0])

    def loss(samples, outputs):
        if samples is None:
            difference = outputs["log_probs"].values() - reference
            return (difference.exp() - difference - 1 + 6e-8 * difference).sum(), {}
        difference = outputs["log_probs"].values() - [reference[:3], reference[3:]][int(samples[0])]
        return (difference.exp() - difference - 1).sum(), {}

    ledger = make_ledger(dtype=torch.float32)
    ledger.outputs["log_probs"][:] = torch.tensor([-1.0, -2.0])
    assert completed(ledger, loss).check_separable(loss, 1e-4).loss == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(value):
    ledger = make_ledger()
    with pytest.raises(LossError, match="the loss is not finite"):
        ledger.check_separable(lambda samples, outputs: (torch.tensor(value), {}), 1e-4)
