"""The right answer: every sample alone through transformers, and veRL's loss on all of them at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.helpers.batches import Row, batch_tensordict, nested


@dataclass
class Truth:
    log_probs: list[torch.Tensor]
    """Per row: one per token but the first (entry i is of token i + 1)."""
    entropies: list[torch.Tensor]
    """Per row, aligned with ``log_probs``."""
    values: list[torch.Tensor]
    """Per row, one per token but the last; empty without ``value_head``."""
    loss: float
    metrics: dict[str, object]
    grads: dict[str, torch.Tensor]
    """By transformers' parameter name; with ``value_head`` also under ``lm_head.weight``."""


def hf_truth(
    model_dir: str,
    rows: Sequence[Row],
    loss_fn: Callable,
    *,
    dtype: torch.dtype = torch.float64,
    temperature: float | Sequence[float] = 1.0,
    calculate_entropy: bool = False,
    value_head: torch.Tensor | None = None,
    wide: bool = False,
    **batch: object,
) -> Truth:
    """Log-probs, loss, metrics and gradients of ``rows``, each row a forward of its own with eager attention.

    Args:
        loss_fn: as ``TrainingWorker.set_loss_fn`` takes it; called once with all rows in one micro-batch.
        value_head: [1, hidden]; the model is a critic with this head.
        wide: in float64 throughout, but for the rotary table: transformers' norms, softmax and routers are float32.
        batch: further keywords of ``batch_tensordict``.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation="eager", experts_implementation="eager", dtype=dtype
    )
    data = batch_tensordict(rows, dtype=dtype, temperature=temperature, calculate_entropy=calculate_entropy, **batch)
    head = None if value_head is None else value_head.detach().to(dtype).requires_grad_()
    outputs: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": [], "values": []}
    with _KeepFloat64() if wide else contextlib.nullcontext():
        _forward_alone(model, rows, data["temperature"], head, outputs)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].values().sum()))
    wanted = ("values",) if head is not None else ("log_probs", "entropy") if calculate_entropy else ("log_probs",)
    loss, metrics = loss_fn(model_output={key: nested(outputs[key]) for key in wanted}, data=data)
    loss.backward()
    grads = _by_expert({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    if head is not None:
        grads["lm_head.weight"] = head.grad
    return Truth(
        log_probs=[x[:-1].detach() for x in outputs["log_probs"]],
        entropies=[x[:-1].detach() for x in outputs["entropy"]],
        values=[x[:-1].detach() for x in outputs["values"]],
        loss=float(loss),
        metrics=metrics,
        grads=grads,
    )


def _forward_alone(
    model: Any,
    rows: Sequence[Row],
    temperatures: torch.Tensor,
    head: torch.Tensor | None,
    outputs: dict[str, list[torch.Tensor]],
) -> None:
    """Append every row's outputs to ``outputs``."""
    for row, temperature in zip(rows, temperatures, strict=True):
        ids = torch.tensor(row.input_ids)[None]
        positions = torch.tensor(row.position_ids or list(range(len(row.input_ids))))[None]
        if head is not None:
            hidden = model.model(ids, position_ids=positions).last_hidden_state
            outputs["values"].append((hidden @ head.T)[0, :, 0])
            continue
        logits = model(ids, position_ids=positions).logits[0]
        log_p = (logits / temperature.to(logits.dtype)).log_softmax(-1)
        labels = torch.roll(ids[0], -1)
        outputs["log_probs"].append(log_p.gather(1, labels[:, None])[:, 0])
        outputs["entropy"].append(-(log_p.exp() * log_p).sum(-1))


def _by_expert(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients under the names that checkpoints have: a matrix an expert, where transformers stacks them."""
    named = {}
    for name, grad in grads.items():
        if ".experts." not in name:
            named[name] = grad
            continue
        stem, _, kind = name.rpartition(".")
        parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
        for expert, stacked in enumerate(grad):
            matrices = stacked.chunk(len(parts))
            named |= {f"{stem}.{expert}.{part}.weight": matrices[place] for part, place in parts.items()}
    return named


class _KeepFloat64(TorchFunctionMode):
    """Float64 tensors are not narrowed to float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_tensor(args[0] if args else None) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type) and args[1:] == (torch.float32,):
                return args[0]
            if kwargs.get("dtype") == torch.float32:  # of a softmax
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def relative_errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error of each tensor over its largest value (at least 1e-3 of the largest of all tensors).

    Both must have the same names.
    """
    if got.keys() != want.keys():
        raise AssertionError(f"names differ: {sorted(got.keys() ^ want.keys())}")
    floor = 1e-3 * max(float(t.abs().max()) for t in want.values())
    return {
        name: float((got[name].double() - want[name].double()).abs().max())
        / max(float(want[name].abs().max()), floor, 1e-30)
        for name in want
    }
