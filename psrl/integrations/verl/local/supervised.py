"""Supervised training through veRL's ``TrainingWorker``: its batch, its loss, and the trained weights.

Shape legend: N tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from psrl.data.samples import ReplaySample
from psrl.integrations.verl.local.metrics import mini_batch_metrics


def supervised_loss() -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """veRL's ``sft_loss``: negative log-prob, averaged over the targets of the mini-batch."""
    unread: Any = None
    return partial(sft_loss, unread)


def supervised_batch(
    samples: Sequence[ReplaySample],
    *,
    max_tokens: int,
    seed: int,
    num_samples: int | None = None,
    num_rows: int | None = None,
) -> TensorDict:
    """The samples as one mini-batch for ``train_mini_batch``. ``loss_mask`` covers whole samples.

    Args:
        max_tokens: veRL's ``max_token_len_per_gpu``.
        num_samples: of the mini-batch over all ranks, padding not counted; None: these are all.
        num_rows: of the mini-batch over all ranks; None: these are all.
    """
    offsets = torch.from_numpy(np.cumsum([0, *(sample.num_tokens for sample in samples)]))

    def jagged(name: str) -> Tensor:
        values_N = np.concatenate([getattr(sample, name) for sample in samples]).astype(np.int64)
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values_N), offsets)

    columns = {"input_ids": "input_ids_N", "position_ids": "position_ids_N", "loss_mask": "loss_mask_N"}
    batch = TensorDict({key: jagged(name) for key, name in columns.items()}, batch_size=[len(samples)])
    batch["temperature"] = torch.ones(len(samples))
    tu.assign_non_tensor_stack(batch, "uid", [sample.uid or sample.session or sample.where for sample in samples])
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=max_tokens,
        global_batch_size=num_samples or len(samples),
        mini_batch_size=num_rows or len(samples),
        epochs=1,
        seed=seed,
        dataloader_kwargs={"shuffle": False},
    )
    return batch


def train_on(worker: Any, batch: TensorDict) -> dict[str, float]:
    """One optimizer step; veRL's metrics, with ``loss`` (per target, before the step) and ``grad_norm``."""
    return mini_batch_metrics(worker.train_mini_batch(batch), 1)[0]


def model_weights(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's weights as transformers names and shapes them; tied embeddings once. Collective."""
    weights, _ = worker.engine.get_per_tensor_param()
    for name, weight in weights:
        yield name, weight.detach().cpu().clone()
