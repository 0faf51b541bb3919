"""Samples as plain rows, and rows as the TensorDict that veRL's TrainingWorker takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


@dataclass
class Row:
    """One sample. Lists marked "per target" have one value for each token with ``loss_mask`` 1, in order."""

    input_ids: list[int]
    loss_mask: list[int]
    """One per token; the first is 0."""
    advantages: list[float] = field(default_factory=list)
    """Per target; default 1.0 each."""
    old_log_probs: list[float] = field(default_factory=list)
    """Per target; default -4.0 each."""
    extra: dict[str, list[float]] = field(default_factory=dict)
    """Further per-target fields, e.g. ``ref_log_prob``, ``values``, ``returns``."""
    position_ids: list[int] | None = None
    uid: str = "g0"
    routed_experts: torch.Tensor | None = None
    """[tokens, layers, experts of a token], all rows of a batch or none; then routes are replayed."""


def random_rows(num_rows: int = 6, vocab: int = 128, max_prompt: int = 8, max_response: int = 10, seed: int = 0):
    """Random unrelated rows; some response tokens are masked out, as tool outputs are."""
    g = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    rows = []
    for index in range(num_rows):
        num_prompt, num_response = integer(1, max_prompt + 1), integer(2, max_response + 1)
        ids = torch.randint(4, vocab, (num_prompt + num_response,), generator=g).tolist()
        kept = (torch.rand(num_response, generator=g) < 0.8).long().tolist()
        kept[0] = 1
        num_targets = sum(kept)
        advantages = torch.randn(num_targets, generator=g, dtype=torch.float64).tolist()
        old = (-5.0 + 0.3 * torch.randn(num_targets, generator=g, dtype=torch.float64)).tolist()
        rows.append(Row(ids, [0] * num_prompt + kept, advantages, old, uid=f"g{index // 2}"))
    return rows


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def no_rows(dtype: torch.dtype) -> torch.Tensor:
    """A jagged tensor of no rows."""
    return torch.nested.nested_tensor_from_jagged(
        torch.zeros(0, dtype=dtype), offsets=torch.zeros(1, dtype=torch.int64)
    )


def split_targets(row: Row) -> int:
    """First token of the response: the first target, or the last token where there is none. At least 1."""
    return row.loss_mask.index(1) if any(row.loss_mask) else len(row.input_ids) - 1


def batch_tensordict(
    rows: Sequence[Row],
    *,
    dtype: torch.dtype = torch.float64,
    max_tokens: int = 1024,
    temperature: float | Sequence[float] = 1.0,
    calculate_entropy: bool = False,
    global_batch_size: int | None = None,
    **non_tensors: Any,
) -> TensorDict:
    """The batch as veRL's trainer sends it, all rows in one mini-batch.

    Per-target values are scattered into the response (0 elsewhere). ``loss_mask`` and ``response_mask`` cover the
    response only. ``mini_batch_size`` for ``train_mini_batch`` is set; use a fresh TensorDict for each call.
    """
    columns: dict[str, list[torch.Tensor]] = {}

    def add(key: str, value: torch.Tensor) -> None:
        columns.setdefault(key, []).append(value)

    for row in rows or [Row([5, 6], [0, 1])]:  # without rows, the columns are those of any row
        start = split_targets(row)
        ids = torch.tensor(row.input_ids)
        mask = torch.tensor(row.loss_mask[start:])
        num_targets = int(mask.sum())
        add("input_ids", ids)
        add("position_ids", torch.tensor(row.position_ids) if row.position_ids else torch.arange(len(ids)))
        add("prompts", ids[:start])
        add("responses", ids[start:])
        add("loss_mask", mask)
        add("response_mask", mask)
        per_target = {
            "advantages": row.advantages or [1.0] * num_targets,
            "old_log_probs": row.old_log_probs or [-4.0] * num_targets,
            **row.extra,
        }
        for key, values in per_target.items():
            full = torch.zeros(len(mask), dtype=dtype)
            full[mask.bool()] = torch.tensor(values, dtype=dtype)
            add(key, full)
        if row.routed_experts is not None:
            add("routed_experts", row.routed_experts)
    if "routed_experts" in columns:
        non_tensors = {"enable_routing_replay": True, **non_tensors}
    jagged = {key: nested(value) if rows else no_rows(value[0].dtype) for key, value in columns.items()}
    batch = TensorDict(jagged, batch_size=[len(rows)])
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(rows)).clone()
    batch["temperature"] = temperatures
    if rows:
        tu.assign_non_tensor_stack(batch, "uid", [row.uid for row in rows])
    tu.assign_non_tensor(
        batch,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=max_tokens,
        global_batch_size=global_batch_size or len(rows),
        mini_batch_size=len(rows),
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        calculate_entropy=calculate_entropy,
        compute_loss=False,
        **non_tensors,
    )
    return batch
