"""Replay samples as the TensorDict that veRL's TrainingWorker takes, and its outputs as values per target.

Shape legend: N tokens of all samples, M targets of all samples, R response tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from psrl.data.samples import ReplaySample
from psrl.errors import InputError
from psrl.types import FloatArray, IntArray


class ReplayBatch:
    """Samples of one call of the worker, flattened once.

    A sample's prompt goes up to its first target (without one, to its last token but one), the response is the rest;
    veRL wants a prompt of at least one token, so a sample of one token has an empty response.
    """

    def __init__(self, samples: Sequence[ReplaySample], *, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: of advantages and log-probs.
        """
        self._dtype = dtype
        self._uids = [sample.uid or sample.session or sample.where for sample in samples]
        seqlens = np.asarray([sample.num_tokens for sample in samples], dtype=np.int64)
        self.cu_seqlens: IntArray = _offsets(seqlens)
        self._input_ids_N = np.concatenate([sample.input_ids_N for sample in samples])
        self._position_ids_N = np.concatenate([sample.position_ids_N for sample in samples])
        self._mask_N = np.concatenate([sample.loss_mask_N for sample in samples])
        prompt_lens = np.asarray([_prompt_len(sample) for sample in samples], dtype=np.int64)
        self._cu_prompts = _offsets(prompt_lens)
        self._cu_responses = _offsets(seqlens - prompt_lens)
        within = np.arange(self.num_tokens) - np.repeat(self.cu_seqlens[:-1], seqlens)
        self._is_response_N: NDArray[np.bool_] = within >= np.repeat(prompt_lens, seqlens)
        self.cu_targets: IntArray = _offsets(np.asarray([sample.num_targets for sample in samples], dtype=np.int64))
        self._advantages_M = np.concatenate([sample.advantages_M for sample in samples])

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    def tensordict(
        self,
        *,
        max_tokens: int,
        temperature: float,
        calculate_entropy: bool,
        per_target: Mapping[str, FloatArray] | None = None,
        **non_tensors: Any,
    ) -> TensorDict:
        """A fresh batch: the worker adds to what it is given.

        Args:
            max_tokens: veRL's ``max_token_len_per_gpu``.
            per_target: [M] further columns, such as ``old_log_probs``, beside the advantages.
            non_tensors: further non-tensor data.
        """
        ids_N, response_N = torch.from_numpy(self._input_ids_N), torch.from_numpy(self._is_response_N)
        mask_R = torch.from_numpy(self._mask_N[self._is_response_N].astype(np.int64))
        columns = {
            "input_ids": _jagged(ids_N, self.cu_seqlens),
            "position_ids": _jagged(torch.from_numpy(self._position_ids_N), self.cu_seqlens),
            "prompts": _jagged(ids_N[~response_N], self._cu_prompts),
            "responses": _jagged(ids_N[response_N], self._cu_responses),
            "loss_mask": _jagged(mask_R, self._cu_responses),
            "response_mask": _jagged(mask_R.clone(), self._cu_responses),
        }
        for key, values_M in {"advantages": self._advantages_M, **(per_target or {})}.items():
            column_R = torch.zeros(len(mask_R), dtype=self._dtype)
            column_R[mask_R.bool()] = torch.from_numpy(values_M).to(self._dtype)
            columns[key] = _jagged(column_R, self._cu_responses)
        batch = TensorDict(columns, batch_size=[self.num_samples])
        batch["temperature"] = torch.full((self.num_samples,), temperature, dtype=torch.float32)
        tu.assign_non_tensor_stack(batch, "uid", self._uids)
        tu.assign_non_tensor(
            batch,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=max_tokens,
            calculate_entropy=calculate_entropy,
            **non_tensors,
        )
        return batch

    def targets_of(self, output: Tensor) -> Tensor:
        """[M] a jagged output of the worker at the targets: entry i of a sample belongs to its token i + 1.

        Raises:
            InputError: the output's lengths are not those of the samples.
        """
        jagged: Any = output
        if not np.array_equal(jagged.offsets().cpu().numpy(), self.cu_seqlens):
            raise InputError("the worker's output does not have one value per token")
        return jagged.values()[torch.from_numpy(np.flatnonzero(self._mask_N) - 1)]


def _prompt_len(sample: ReplaySample) -> int:
    if sample.num_targets:
        return int(sample.loss_mask_N.argmax())
    return max(1, sample.num_tokens - 1)


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _jagged(values: Tensor, offsets: IntArray) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values.contiguous(), torch.from_numpy(offsets))
