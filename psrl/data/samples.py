"""Token samples: the rows that a replay trains on, checked field by field.

Shape legend: N tokens of the sample, M targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.data.rows import Row
from psrl.errors import InputError
from psrl.types import BoolArray, FloatArray, IntArray

MAX_ID = (1 << 31) - 1
"""Largest token id or position: they are packed into one 63-bit key in the prefix tree."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class ReplaySample:
    """One sample. A target is a token with ``loss_mask`` true; the first token never is one."""

    where: str
    """``file:line`` of its row."""
    input_ids_N: IntArray
    loss_mask_N: BoolArray
    position_ids_N: IntArray
    advantages_M: FloatArray
    old_log_probs_M: FloatArray | None
    """None: use those that the old-log-prob phase computes."""
    uid: str
    """Samples with one uid come from one prompt."""
    session: str
    """Samples with one session come from one trajectory."""
    index: int
    """Step within the session."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_N)

    @property
    def num_targets(self) -> int:
        return len(self.advantages_M)

    @property
    def has_default_positions(self) -> bool:
        return bool((self.position_ids_N == np.arange(self.num_tokens)).all())


def padding_of(sample: ReplaySample) -> ReplaySample:
    """A row that is computed and counts for nothing, where every rank needs equally many: two tokens, no target."""
    none = np.empty(0)
    return dataclasses.replace(
        sample,
        input_ids_N=np.repeat(sample.input_ids_N[:1], 2),
        loss_mask_N=np.zeros(2, dtype=bool),
        position_ids_N=np.arange(2),
        advantages_M=none,
        old_log_probs_M=None if sample.old_log_probs_M is None else none,
    )


def parse_sample(row: Row) -> ReplaySample:
    """Check a token-sample row and turn it into a sample. Keys that no field reads are left alone.

    Raises:
        InputError: a field is missing, has a wrong type or length, or a value out of range; names file and line.
    """
    where, values = row
    ids = _integers(where, values, "input_ids", high=MAX_ID)
    mask = _integers(where, values, "loss_mask", high=1)
    num_tokens = len(ids)
    if num_tokens == 0:
        raise InputError(f"{where}: input_ids is empty: a sample has at least one token")
    if len(mask) != num_tokens:
        raise InputError(f"{where}: loss_mask has {len(mask)} entries, but input_ids has {num_tokens}")
    if mask[0]:
        raise InputError(f"{where}: the first loss_mask entry is 1, but nothing precedes the first token to predict it")
    num_targets = int(mask.sum())
    return ReplaySample(
        where=where,
        input_ids_N=ids,
        loss_mask_N=mask.astype(np.bool_),
        position_ids_N=_positions(where, values, num_tokens),
        advantages_M=_advantages(where, values, num_targets),
        old_log_probs_M=_old_log_probs(where, values, num_targets),
        uid=_label(where, values, "uid", default=""),
        session=_label(where, values, "session", default=""),
        index=_index(where, values),
    )


def check_vocabulary(samples: Sequence[ReplaySample], vocab_size: int, model: str) -> None:
    """Check that every id has a row in the embedding of ``model``.

    Raises:
        InputError: names the first sample and token that does not.
    """
    for sample in samples:
        outside = np.flatnonzero(sample.input_ids_N >= vocab_size)
        if len(outside):
            token = int(outside[0])
            raise InputError(
                f"{sample.where}: token id {sample.input_ids_N[token]} (token {token}) is outside the vocabulary: "
                f"{model} has {vocab_size} ids"
            )


def _required(where: str, values: Mapping[str, Any], key: str) -> list[Any]:
    if key not in values:
        raise InputError(f"{where}: the row has no {key}")
    return _list(where, key, values[key])


def _list(where: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: {key} must be a list, got {_show(value)}")
    return value


def _integers(where: str, values: Mapping[str, Any], key: str, *, high: int) -> IntArray:
    """A list of integers in 0 .. high. JSON booleans and floats are not integers."""
    items = _required(where, values, key)
    if not set(map(type, items)) <= {int}:
        bad = next(i for i, item in enumerate(items) if type(item) is not int)
        raise InputError(f"{where}: {key}[{bad}] must be an integer, got {_show(items[bad])}")
    if items and (min(items) < 0 or max(items) > high):
        bad = next(i for i, item in enumerate(items) if not 0 <= item <= high)
        raise InputError(f"{where}: {key}[{bad}] must be in 0 .. {high}, got {_show(items[bad])}")
    return np.asarray(items, dtype=np.int64)


def _positions(where: str, values: Mapping[str, Any], num_tokens: int) -> IntArray:
    if values.get("position_ids") is None:
        return np.arange(num_tokens, dtype=np.int64)
    positions = _integers(where, values, "position_ids", high=MAX_ID)
    if len(positions) != num_tokens:
        raise InputError(f"{where}: position_ids has {len(positions)} entries, but input_ids has {num_tokens}")
    return positions


def _advantages(where: str, values: Mapping[str, Any], num_targets: int) -> FloatArray:
    value = values.get("advantage")
    if value is None:
        return np.ones(num_targets)
    if isinstance(value, list):
        return _floats(where, "advantage", value, num_targets)
    return np.full(num_targets, _float(where, "advantage", value))


def _old_log_probs(where: str, values: Mapping[str, Any], num_targets: int) -> FloatArray | None:
    value = values.get("old_log_probs")
    return None if value is None else _floats(where, "old_log_probs", _list(where, "old_log_probs", value), num_targets)


def _floats(where: str, key: str, items: list[Any], num_targets: int) -> FloatArray:
    if len(items) != num_targets:
        raise InputError(
            f"{where}: {key} has {len(items)} entries, but the sample has {num_targets} targets (loss_mask 1)"
        )
    return np.asarray([_float(where, f"{key}[{i}]", item) for i, item in enumerate(items)], dtype=np.float64)


def _float(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: {name} must be a number, got {_show(value)}")
    if not abs(value) <= _FLOAT32_MAX:  # not for NaN either
        kind = "NaN" if value != value else _show(value)
        raise InputError(f"{where}: {name} must be a finite float32 number, got {kind}")
    return float(value)


def _label(where: str, values: Mapping[str, Any], key: str, *, default: str) -> str:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{where}: {key} must be a string or an integer, got {_show(value)}")
    return str(value)


def _index(where: str, values: Mapping[str, Any]) -> int:
    value = values.get("index")
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise InputError(f"{where}: index must be a non-negative integer, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    """The value for a message: what JSON calls its type, and a short excerpt."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 40 else text[:37] + "..."
