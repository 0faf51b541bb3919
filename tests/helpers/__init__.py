"""Helpers shared by the tests: tiny checkpoints, veRL batches, workers, and the right answer from transformers."""

from tests.helpers.batches import Row, batch_tensordict, nested, random_rows, split_targets
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.truth import Truth, hf_truth, relative_errors
from tests.helpers.workers import make_worker, ppo_loss_fn, value_loss_fn

__all__ = [
    "Row",
    "Truth",
    "batch_tensordict",
    "hf_truth",
    "make_checkpoint",
    "make_worker",
    "nested",
    "ppo_loss_fn",
    "random_rows",
    "relative_errors",
    "split_targets",
    "value_loss_fn",
]
