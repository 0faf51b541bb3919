"""Log-probs and entropies of edges against plain autograd, and the loss ledger."""

import numpy as np
import pytest
import torch

from psrl.errors import LossError
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


def make_ledger(kinds=("log_probs",)):
    """Two samples of three and two tokens that share their first edge."""
    edges = Edges(
        source_E=np.asarray([0, 1]),
        label_E=np.asarray([5, 6]),
        temperature_E=np.ones(2),
        target_edges_M=np.asarray([0, 1, 0]),
        target_positions_M=np.asarray([0, 1, 3]),
        cu_targets=np.asarray([0, 2, 3]),
    )
    return LossLedger(edges, np.asarray([0, 3, 5]), kinds=kinds, dtype=torch.float64, device=torch.device("cpu"))


def test_shared_edges_collect_the_cotangents_of_their_samples():
    ledger = make_ledger()
    ledger.outputs["log_probs"][:] = torch.tensor([0.5, 2.0])
    seen = []

    def loss(samples, outputs):
        seen.append((None if samples is None else samples.tolist(), outputs["log_probs"]))
        return outputs["log_probs"].values().square().sum()

    ledger.complete(np.asarray([1]), loss)
    assert seen[0][0] == [1] and seen[0][1].unbind()[0].tolist() == [0.5, 0.0]
    assert ledger.cotangents["log_probs"].tolist() == [1.0, 0.0] and ledger.loss_sum == 0.25
    ledger.complete(np.asarray([0]), loss)
    assert seen[1][1].unbind()[0].tolist() == [0.5, 2.0, 0.0]
    assert ledger.cotangents["log_probs"].tolist() == [2.0, 4.0] and ledger.loss_sum == 4.5
    ledger.complete(np.asarray([], dtype=np.int64), loss)
    assert len(seen) == 2


def test_outputs_that_the_loss_ignores_have_no_cotangent():
    ledger = make_ledger(("log_probs", "entropy"))
    ledger.complete(None, lambda samples, outputs: outputs["entropy"].values().sum())
    assert ledger.cotangents["log_probs"].tolist() == [0.0, 0.0]
    assert ledger.cotangents["entropy"].tolist() == [2.0, 1.0]
    ledger.complete(None, lambda samples, outputs: torch.tensor(3.0))
    assert ledger.loss_sum == 3.0


def test_the_sum_over_samples_is_checked():
    ledger = make_ledger()
    ledger.complete(None, lambda samples, outputs: torch.tensor(1.0))
    ledger.check_sum(1.0 + 1e-9, 1e-6)
    with pytest.raises(LossError, match="the loss is not a sum over samples"):
        ledger.check_sum(1.1, 1e-6)
    for value in (float("nan"), float("inf")):
        with pytest.raises(LossError, match="the loss is not finite"):
            ledger.check_sum(value, 1e-6)
