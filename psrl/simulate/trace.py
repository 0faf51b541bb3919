"""The rows of a simulated step: a trace's samples, repeated and padded as veRL pads.

Shape legend: S rows, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psrl.data import ReplaySample
from psrl.errors import ConfigError
from psrl.placement.cells import RowKey
from psrl.types import BoolArray, IntArray, SampleBatch

PADDING_TOKENS = 128
"""Length of the rows that veRL fills a batch up with (verl/trainer/ppo/padding_utils.py)."""
_ID_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """All rows of a step."""

    samples: SampleBatch
    keys: tuple[RowKey, ...]
    is_padding_S: BoolArray

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        """Of the rows that are no padding."""
        return int(self.samples.seqlens_S[~self.is_padding_S].sum())

    def token_rows(self) -> list[IntArray]:
        """Token ids of every row."""
        return np.split(self.samples.token_ids_N, self.samples.cu_seqlens[1:-1])

    def position_rows(self) -> list[IntArray]:
        return np.split(self.samples.position_ids_N, self.samples.cu_seqlens[1:-1])


def make_trace(samples: Sequence[ReplaySample], *, multiple: int, replicas: int = 1) -> SimulatedTrace:
    """Rows of one step.

    Args:
        multiple: of the number of rows; padding rows without a target fill it up.
        replicas: times that the trace is in the step, as other prompts each time: replicas share nothing.

    Raises:
        ConfigError: token ids of the replicas do not fit 31 bits.
    """
    vocabulary = 1 + max(int(sample.input_ids_N.max()) for sample in samples)
    if vocabulary * (replicas + 1) >= _ID_LIMIT:
        raise ConfigError(f"{replicas} replicas of ids up to {vocabulary} do not fit 31 bits: use fewer replicas")
    ids = [sample.input_ids_N + vocabulary * copy for copy in range(replicas) for sample in samples]
    masks = [sample.loss_mask_N for _ in range(replicas) for sample in samples]
    positions = [sample.position_ids_N for _ in range(replicas) for sample in samples]
    keys = [
        RowKey(f"{copy}:{sample.uid or sample.where}", sample.session or str(index), sample.index)
        for copy in range(replicas)
        for index, sample in enumerate(samples)
    ]
    missing = -len(ids) % multiple
    for index in range(missing):
        ids.append(np.full(PADDING_TOKENS, vocabulary * replicas, dtype=np.int64))
        masks.append(np.zeros(PADDING_TOKENS, dtype=np.bool_))
        positions.append(np.arange(PADDING_TOKENS, dtype=np.int64))
        keys.append(RowKey("padding", str(index), 0))
    seqlens = np.asarray([len(row) for row in ids], dtype=np.int64)
    uids = np.unique([key.uid for key in keys], return_inverse=True)[1]
    return SimulatedTrace(
        samples=SampleBatch(
            token_ids_N=np.concatenate(ids),
            position_ids_N=np.concatenate(positions),
            cu_seqlens=np.concatenate([[0], np.cumsum(seqlens)]).astype(np.int64),
            target_mask_N=np.concatenate(masks),
            group_ids_S=uids.astype(np.int64).reshape(-1),
            temperatures_S=np.ones(len(keys)),
        ),
        keys=tuple(keys),
        is_padding_S=np.arange(len(keys)) >= len(keys) - missing,
    )
