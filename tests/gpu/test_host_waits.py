"""A forward-only phase on a GPU without a single synchronisation of the host."""

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.integrations.verl.engine import mini_batch
from tests.helpers import make_checkpoint, make_worker
from tests.helpers.engines import run_inference
from tests.helpers.forests import step_rows, tree_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_forward_only(tmp_path, monkeypatch):
    worker = make_worker(make_checkpoint(tmp_path, "qwen2", head_dim=64), psrl=PSRLConfig(), dtype="bfloat16")
    rows = tree_rows() + step_rows()
    run_inference(worker, rows, max_tokens=5, dtype=torch.bfloat16)  # compiles the kernels
    run_plan = mini_batch.run_plan

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_plan(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(mini_batch, "run_plan", watched)
    run_inference(worker, rows, max_tokens=5, dtype=torch.bfloat16)
