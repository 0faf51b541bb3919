"""A pass on a GPU without a single synchronisation of the host."""

import contextlib

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.integrations.verl.engine import mini_batch
from psrl.runtime.loss import LossLedger
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import step_rows, tree_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUDGET = 5
"""Tokens of a micro-batch: paths have several blocks."""


@contextlib.contextmanager
def sync_mode(mode):
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", head_dim=64)
    return make_worker(checkpoint, psrl=PSRLConfig(attention_backend="triton"), dtype="bfloat16")


def watch(monkeypatch):
    """From here on a pass that synchronises raises; veRL's loss, which reads its metrics as numbers, may."""
    run_plan, complete = mini_batch.run_plan, LossLedger.complete

    def watched(*args):
        with sync_mode("error"):
            run_plan(*args)

    def unwatched(*args):
        with sync_mode("default"):
            complete(*args)

    monkeypatch.setattr(mini_batch, "run_plan", watched)
    monkeypatch.setattr(LossLedger, "complete", unwatched)


def test_forward_only(worker, monkeypatch):
    rows = tree_rows() + step_rows()
    run_inference(worker, rows, max_tokens=BUDGET, dtype=torch.bfloat16)  # compiles the kernels
    watch(monkeypatch)
    run_inference(worker, rows, max_tokens=BUDGET, dtype=torch.bfloat16)


def test_update(worker, monkeypatch):
    rows, loss = tree_rows() + step_rows(), ppo_loss_fn(entropy_coeff=0.1)
    run_update(worker, rows, loss, max_tokens=BUDGET, dtype=torch.float32, calculate_entropy=True)
    watch(monkeypatch)
    run_update(worker, rows, loss, max_tokens=BUDGET, dtype=torch.float32, calculate_entropy=True)
