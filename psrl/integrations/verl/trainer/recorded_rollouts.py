"""Rollouts on disk: what generation produced in every step, and steps that train on it again instead of generating.

A folder has a subfolder for every step, ``step_000001`` and so on, each with

- ``step.json``: format, step, and the settings of the job that decide what the rows mean;
- ``rows.jsonl``: a line a row, ``{"key", "tag", "fields"}``, with the fields that are no tensors;
- ``tensors.safetensors``: two tensors a field: ``NAME``, the values of all rows one after the other, and
  ``NAME#shape``, [rows, dimensions] the shape of each row.

Hooks: ``verl/trainer/ppo/v1/replay_buffer.py`` (``ReplayBuffer.sample``), whose result is recorded or replaced. veRL's
own ``skip.rollout_tq`` pickles, generates where a step is missing, and cycles rows where their number differs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from psrl.errors import ConfigError, InputError
from psrl.integrations.verl.job.config import OrchestratorConfig

FORMAT = 1
_STEP, _ROWS, _TENSORS = "step.json", "rows.jsonl", "tensors.safetensors"
_SETTINGS = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "data.max_prompt_length",
    "data.max_response_length",
)
"""Keys that must be the same where a step is replayed."""

Sample = Callable[..., tuple[KVBatchMeta, dict[str, Any]]]
"""``ReplayBuffer.sample``: (global_steps, partition_id, batch_size) -> batch, metrics."""


class StepRows(NamedTuple):
    """The rows of a step, in the order in which they were sampled."""

    keys: list[str]
    tags: list[dict[str, Any]]
    fields: list[dict[str, Any]]
    """Of every row: tensors and JSON values, by name; the same names for all."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def rollout_settings(config: DictConfig) -> dict[str, Any]:
    """What must be the same in the job that records and the one that replays."""
    return {key: OmegaConf.select(config, key) for key in _SETTINGS}


# ------------------------------------------------------------------------------------------------------------- files
def write_step(folder: Path, step: int, settings: Mapping[str, Any], rows: StepRows) -> None:
    """Write a step; its subfolder appears whole or not at all, and takes the place of an older one.

    Raises:
        InputError: a field is neither a tensor nor a JSON value; names it.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = step_folder(folder, step)
    staging = Path(tempfile.mkdtemp(dir=folder, prefix=f".{final.name}."))
    try:
        tensors: dict[str, Tensor] = {}
        names = [name for name, value in rows.fields[0].items() if isinstance(value, Tensor)] if rows.fields else []
        for name in names:
            values = [_tensor(row, name) for row in rows.fields]
            tensors[name] = torch.cat([value.reshape(-1) for value in values])
            tensors[f"{name}#shape"] = torch.tensor([list(value.shape) for value in values], dtype=torch.int64)
        save_file(tensors, staging / _TENSORS)
        with (staging / _ROWS).open("w", encoding="utf-8") as stream:
            for key, tag, fields in zip(*rows, strict=True):
                plain = {name: value for name, value in fields.items() if name not in names}
                stream.write(_json_line({"key": key, "tag": tag, "fields": plain}) + "\n")
        header = {"format": FORMAT, "step": step, "rows": len(rows.keys), "settings": dict(settings)}
        (staging / _STEP).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        mode = folder.stat().st_mode & 0o777
        for file in staging.iterdir():
            file.chmod(mode & 0o666)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        if final.exists():
            shutil.rmtree(final)
        staging.chmod(mode)
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_step(folder: Path, step: int, settings: Mapping[str, Any]) -> StepRows:
    """The rows of a step.

    Raises:
        InputError: the step is missing or broken.
        ConfigError: it was recorded with other settings; names the first key that differs.
    """
    where = step_folder(folder, step)
    if not where.is_dir():
        found = sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
        has = f"it has {len(found)} steps, {found[0]} to {found[-1]}" if found else "it has no steps"
        raise InputError(f"psrl.replay_rollouts={folder}: step {step} was not recorded ({has})")
    try:
        header = json.loads((where / _STEP).read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise InputError(f"{where}: format {header['format']!r}, but this version reads {FORMAT}")
        recorded = header["settings"]
        for key, value in settings.items():
            if recorded.get(key) != value:
                raise ConfigError(
                    f"{key}={value}, but {where} was recorded with {recorded.get(key)}: rollouts are replayed with the "
                    "settings that they were recorded with"
                )
        lines = [json.loads(line) for line in (where / _ROWS).read_bytes().splitlines()]
        tensors = load_file(where / _TENSORS)
        fields = [dict(line["fields"]) for line in lines]
        for name in tensors:
            if not name.endswith("#shape"):
                for row, value in zip(fields, _rows(tensors[name], tensors[f"{name}#shape"]), strict=True):
                    row[name] = value
        if len(lines) != header["rows"] or not lines:
            raise InputError(f"{where}: {len(lines)} rows, but {_STEP} says {header['rows']}")
        return StepRows([line["key"] for line in lines], [line["tag"] for line in lines], fields)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, InputError | ConfigError):
            raise
        raise InputError(f"{where}: not a whole recorded step: {error!r}") from error


def _tensor(row: Mapping[str, Any], name: str) -> Tensor:
    value = row.get(name)
    if not isinstance(value, Tensor):
        raise InputError(f"psrl.record_rollouts: {name} is a tensor in some rows only")
    return value.detach().cpu().contiguous()


def _rows(values: Tensor, shape_SD: Tensor) -> list[Tensor]:
    """Values of all rows, cut and shaped. A row of no dimension is a number."""
    shapes = [tuple(shape) for shape in shape_SD.tolist()]
    return [
        part.reshape(shape).clone()
        for part, shape in zip(values.split([math.prod(shape) for shape in shapes]), shapes, strict=True)
    ]


def _json_line(row: dict[str, Any]) -> str:
    """
    Raises:
        InputError: a value would not be the same when it is read again; names its key.
    """
    for group in ("tag", "fields"):
        for name, value in row[group].items():
            try:
                same = json.loads(json.dumps(value)) == value
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"psrl.record_rollouts: {name} of row {row['key']} is no JSON value: {error}"
                ) from None
            if not same:
                raise InputError(f"psrl.record_rollouts: {name} of row {row['key']} changes when it is written as JSON")
    return json.dumps(row, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------ TransferQueue
def fetch_rows(batch: KVBatchMeta) -> StepRows:
    """Everything that TransferQueue holds of a batch's rows."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id or "train")
    columns = {str(name): _column(data[name]) for name in data.keys()}  # noqa: SIM118 - no mapping
    fields = [{name: values[row] for name, values in columns.items()} for row in range(len(batch.keys))]
    return StepRows(list(batch.keys), [dict(tag) for tag in batch.tags], fields)


def put_rows(rows: StepRows, partition_id: str) -> KVBatchMeta:
    """Put rows into TransferQueue; returns the batch that ``ReplayBuffer.sample`` would."""
    tq.kv_batch_put(
        keys=rows.keys, partition_id=partition_id, fields=tu.list_of_dict_to_tensordict(rows.fields), tags=rows.tags
    )
    return KVBatchMeta(partition_id=partition_id, keys=list(rows.keys), tags=[dict(tag) for tag in rows.tags])


def _column(values: Any) -> list[Any]:
    """The values of a field, by row."""
    if isinstance(values, Tensor):
        return list(values.unbind())
    return [_plain(tu.unwrap_non_tensor_data(value)) for value in values]


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays inside a value as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------------------------ replay buffer
@dataclass(slots=True)
class RolloutStore:
    """Where a job's rollouts go to, or come from. Made once, by the trainer."""

    settings: dict[str, Any]
    record: Path | None = None
    replay: Path | None = None
    _first_step: int | None = None

    @classmethod
    def of(cls, config: OrchestratorConfig, settings: dict[str, Any]) -> RolloutStore:
        """The store that the ``psrl`` group asks for; without any it does nothing."""
        folders = (config.record_rollouts, config.replay_rollouts)
        record, replay = (Path(folder).expanduser().resolve() if folder else None for folder in folders)
        return cls(settings, record, replay)

    @property
    def replays(self) -> bool:
        return self.replay is not None

    def begin_step(self, step: int) -> None:
        """Check, before a step generates, that it can be recorded or replayed.

        Raises:
            InputError: nothing was recorded of the step, or the folder holds rollouts of another job.
        """
        if self._first_step is None:
            self._first_step = step
        if self.record is not None and self._first_step == 1 and step_folder(self.record, step).exists():
            raise InputError(f"psrl.record_rollouts={self.record} holds a step {step} already: name another folder")
        if self.replay is not None and not step_folder(self.replay, step).is_dir():
            read_step(self.replay, step, self.settings)

    def attach(self, buffer: Any) -> None:
        """Put recording or replaying around ``buffer.sample``, on the instance."""
        sample: Sample = buffer.sample

        def sampled(global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
            if partition_id != "train":
                return sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
            if self.replay is not None:
                rows = read_step(self.replay, global_steps, self.settings)
                return put_rows(rows, partition_id), {}
            batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
            assert self.record is not None
            write_step(self.record, global_steps, self.settings, fetch_rows(batch))
            return batch, metrics

        if self.record is not None or self.replay is not None:
            buffer.sample = sampled
