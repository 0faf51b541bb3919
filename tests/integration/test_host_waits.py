"""Nothing inside a pass makes the host wait for the device, so that a GPU's queue never runs dry.

On the CPU the calls that would wait are recognised by their operators: reading a number, and sizes that depend on
values.
"""

import traceback
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from psrl.config import PSRLConfig
from psrl.integrations.verl.engine import mini_batch
from tests.helpers import make_checkpoint, make_worker, ppo_loss_fn
from tests.helpers.engines import run_inference, run_update
from tests.helpers.forests import step_rows, tree_rows

WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "repeat_interleave",
}  # fmt: skip
LOSS = ("verl/workers/utils/", "verl/trainer/ppo/core_algos.py", "verl/utils/")
"""veRL's loss functions read their metrics as numbers, with sharing and without."""
ON_HOST = ("megatron/core/models/common/embeddings/rope_utils.py",)
"""Reads the lengths of packed sequences, in every layer; psrl keeps them on the host."""


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_place: Counter[str] = Counter()
        self.num_operators = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.num_operators += 1
        name = operator.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_mask = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices)
        if name in WAITING or is_mask:
            place = self._place()
            if not any(part in place for part in ON_HOST):
                self.by_place[place] += 1
        return operator(*args, **(kwargs or {}))

    @staticmethod
    def _place() -> str:
        """The caller, below torch and below the functions that the device mode replaces."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        frames = [f for f in frames if not f.filename.endswith(("float64.py", "cpu_device.py"))]
        return f"{frames[-1].filename}:{frames[-1].lineno}"


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2"), psrl=PSRLConfig())


@pytest.fixture
def waits(monkeypatch):
    seen = Waits()
    run_plan = mini_batch.run_plan

    def watched(*args):
        with seen:
            run_plan(*args)

    monkeypatch.setattr(mini_batch, "run_plan", watched)
    return seen


@pytest.mark.parametrize("budget", [5, 1000])
def test_update(worker, waits, budget):
    run_update(
        worker, tree_rows() + step_rows(), ppo_loss_fn(entropy_coeff=0.1), max_tokens=budget, calculate_entropy=True
    )
    assert waits.num_operators > 1000
    # What watches sees: veRL's own loss reads its metrics.
    assert any(part in place for place in waits.by_place for part in LOSS)
    assert [place for place in waits.by_place if not any(part in place for part in LOSS)] == []


def test_forward_only(worker, waits):
    run_inference(worker, tree_rows() + step_rows(), max_tokens=5, calculate_entropy=True)
    assert waits.num_operators > 1000
    assert waits.by_place == {}
