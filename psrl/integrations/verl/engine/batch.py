"""From veRL's TensorDict to a SampleBatch.

Shape legend: N tokens of all samples, S samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from psrl.errors import InputError, UnsupportedError
from psrl.integrations.verl.engine.loss_scope import Targets
from psrl.types import BoolArray, FloatArray, IntArray, SampleBatch

_REFUSED_FLAGS = {
    "calculate_sum_pi_squared": "calculate_sum_pi_squared (optimal_token_baseline)",
    "distillation_use_topk": "distillation",
    "distillation_only": "distillation",
}


class RowSelector:
    """Selects rows of a mini-batch, unbinding its jagged tensors once."""

    def __init__(self, data: TensorDict) -> None:
        self.data = data
        self._unbound = {key: value.unbind() for key, value in data.items()
                         if isinstance(value, torch.Tensor) and value.is_nested}  # fmt: skip

    def select(self, rows: IntArray) -> TensorDict:
        """The chosen rows as a new TensorDict; non-tensor data of the whole batch stays."""
        index = torch.from_numpy(rows)
        jagged = {key: tu.nested_tensor_from_tensor_list([parts[row] for row in rows.tolist()])
                  for key, parts in self._unbound.items()}  # fmt: skip
        others = tu.index_select_tensor_dict(self.data.exclude(*jagged), index)
        others.update(jagged)
        return others


def samples_from_tensordict(data: TensorDict, targets: Targets = Targets.LOSS_MASK) -> SampleBatch:
    """Read the samples of a mini-batch.

    ``loss_mask`` covers a whole sample (supervised data) or its response, jagged or right-padded (RL data).

    Raises:
        UnsupportedError: the batch asks for something that rules out sharing.
        InputError: fields disagree in length, or a first token is a target.
    """
    _refuse_unsupported(data)
    input_ids = data["input_ids"]
    cu_seqlens = _offsets(input_ids).cpu().numpy().astype(np.int64)
    return SampleBatch(
        token_ids_N=input_ids.values().cpu().numpy().astype(np.int64),
        position_ids_N=_positions(data, cu_seqlens),
        cu_seqlens=cu_seqlens,
        target_mask_N=_target_mask(data, cu_seqlens, targets),
        group_ids_S=_group_ids(data, len(cu_seqlens) - 1),
        temperatures_S=_temperatures(data, len(cu_seqlens) - 1),
    )


def _offsets(jagged: torch.Tensor) -> torch.Tensor:
    """[S + 1] offsets of the rows in ``jagged.values()``."""
    return jagged.offsets()  # pyright: ignore[reportAttributeAccessIssue]  # jagged tensors have no public type


def _refuse_unsupported(data: TensorDict) -> None:
    for key, option in _REFUSED_FLAGS.items():
        if tu.get_non_tensor_data(data, key=key, default=False):
            raise UnsupportedError(f"prefix sharing does not support {option}; switch it off or set psrl.enable=false")
    if tu.get_non_tensor_data(data, key="pad_mode", default=DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        raise UnsupportedError("prefix sharing needs pad_mode=no_padding; set it or set psrl.enable=false")
    if not data["input_ids"].is_nested:
        raise UnsupportedError("prefix sharing needs jagged input_ids (use_remove_padding=true)")
    rows = data.get("multi_modal_inputs", None)
    # Mappings; where TransferQueue has stacked them, tensordicts, which have no truth value.
    for row in () if rows is None else rows:
        values = tu.unwrap_non_tensor_data(row)
        if values is not None and len(list(values.keys())):
            raise UnsupportedError("prefix sharing does not support multi_modal_inputs; set psrl.enable=false")


def _positions(data: TensorDict, cu_seqlens: IntArray) -> IntArray:
    position_ids = data.get("position_ids", None)
    if position_ids is None:
        return np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    if position_ids.dim() > 2:
        raise UnsupportedError("prefix sharing does not support multi-axis position_ids (mrope); set psrl.enable=false")
    values = position_ids.values().cpu().numpy().astype(np.int64)
    if len(values) != cu_seqlens[-1]:
        raise InputError(f"position_ids has {len(values)} entries, input_ids {cu_seqlens[-1]}")
    return values


def _target_mask(data: TensorDict, cu_seqlens: IntArray, targets: Targets) -> BoolArray:
    """[N] tokens whose outputs are wanted. The loss mask is right-aligned where it covers the response only."""
    loss_mask = data["loss_mask"]
    seqlens = np.diff(cu_seqlens)
    if loss_mask.is_nested:
        values, lengths = loss_mask.values().cpu().numpy() != 0, _offsets(loss_mask).diff().cpu().numpy()
    else:
        lengths = _response_lengths(data, loss_mask)
        padded = loss_mask.cpu().numpy() != 0
        values = padded[np.arange(padded.shape[1]) < lengths[:, None]]
    if (lengths > seqlens).any():
        sample = int(np.argmax(lengths > seqlens))
        raise InputError(f"sample {sample}: loss_mask has {lengths[sample]} entries for {seqlens[sample]} tokens")
    mask, covered = np.zeros((2, cu_seqlens[-1]), dtype=bool)
    ends = np.cumsum(lengths)
    places = np.arange(len(values)) + np.repeat(cu_seqlens[1:] - ends, lengths)
    mask[places], covered[places] = values, True
    if targets is Targets.LOSS_MASK:
        return mask
    wanted = covered if targets is Targets.RESPONSE else np.ones_like(mask)
    first_tokens = cu_seqlens[:-1]
    wanted[first_tokens] = mask[first_tokens]  # nothing predicts them
    return wanted


def _response_lengths(data: TensorDict, loss_mask: torch.Tensor) -> IntArray:
    responses = data.get("responses", None)
    if responses is not None and responses.is_nested:
        return _offsets(responses).diff().cpu().numpy().astype(np.int64)
    if "attention_mask" not in data:
        raise InputError("a padded loss_mask needs jagged responses or an attention_mask to tell response lengths")
    return data["attention_mask"][:, -loss_mask.shape[1] :].sum(-1).cpu().numpy().astype(np.int64)


def _group_ids(data: TensorDict, num_samples: int) -> IntArray:
    """Dense ids of veRL's ``uid``; every sample its own group without one."""
    uids: Any = data.get("uid", None)
    if uids is None:
        return np.arange(num_samples, dtype=np.int64)
    names = [str(tu.unwrap_non_tensor_data(uid)) for uid in uids]
    return np.unique(names, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _temperatures(data: TensorDict, num_samples: int) -> FloatArray:
    temperature = data.get("temperature", None)
    if temperature is None:
        return np.ones(num_samples)
    # Upstream rounds temperatures to float32 (transformer_impl.py, forward_step).
    values = torch.as_tensor(tu.unwrap_non_tensor_data(temperature), dtype=torch.float32).double().cpu().numpy()
    return np.broadcast_to(values.reshape(-1), (num_samples,)).copy()
