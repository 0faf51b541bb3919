"""Checkpoints of an offline training: whole or not at all.

A checkpoint is written to ``step_N.partial`` by every rank and renamed to ``step_N`` once all of them have written and
synced: a folder without that suffix is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from psrl.errors import InputError
from psrl.offline.options import OfflineOptions
from psrl.offline.processes import Processes

_META = "training.json"
_COMPLETE = re.compile(r"step_(\d+)")
_SAME = ("objective", "batch", "mini_batch", "seed", "limit", "mode", "dtype", "distributed_optimizer", "layout")
"""Options that decide which rows a step has, or how the state is cut over ranks."""


class Checkpoints:
    """Every method is collective."""

    def __init__(self, options: OfflineOptions, worker: Any, processes: Processes) -> None:
        self._options, self._worker, self._processes = options, worker, processes
        self._settings = {name: options.for_report()[name] for name in _SAME}
        self._settings["world_size"] = processes.world_size
        self._last = 0

    def after(self, step: int, total: int) -> None:
        """Save if it is time to. Called between batches: within one, old log-probs belong to earlier weights."""
        options = self._options
        if options.checkpoints is None or step == self._last:
            return
        if step == total or (options.save_every is not None and step - self._last >= options.save_every):
            self.save(step)

    def resume(self) -> int:
        """Load the last complete checkpoint; returns its step, 0 if there is none to load.

        Raises:
            InputError: the folder is not usable, holds checkpoints that are not to be resumed, or one of another
                training.
        """
        folder = self._options.checkpoints
        if folder is None:
            return 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            steps = _complete(folder)
        except OSError as error:
            raise InputError(f"--checkpoints {folder}: {error.strerror or error}") from error
        if not steps:
            return 0
        if self._options.resume == "never":
            raise InputError(
                f"--checkpoints {folder} holds step_{steps[-1]}: name another folder, or use --resume auto"
            )
        path = folder / f"step_{steps[-1]}"
        self._check(path)
        self._worker.load_checkpoint(str(path), del_local_after_load=False)
        self._last = steps[-1]
        return self._last

    def save(self, step: int) -> None:
        """Write ``step_N``, and remove what is older than ``--keep`` checkpoints."""
        folder = self._options.checkpoints
        assert folder is not None
        staging, target = folder / f"step_{step}.partial", folder / f"step_{step}"
        if self._processes.rank == 0:
            for path in (staging, target):
                shutil.rmtree(path, ignore_errors=not path.exists())
            staging.mkdir()
        dist.barrier()
        self._worker.save_checkpoint(str(staging), global_step=step)
        _sync(staging)
        dist.barrier()
        if self._processes.rank == 0:
            (staging / _META).write_text(json.dumps({"step": step, "settings": self._settings}), encoding="utf-8")
            _sync(staging)
            staging.rename(target)
            _sync(folder, recurse=False)
            for old in _complete(folder)[: -self._options.keep] if self._options.keep else []:
                shutil.rmtree(folder / f"step_{old}")
        dist.barrier()
        self._last = step

    def _check(self, path: Path) -> None:
        try:
            saved = json.loads((path / _META).read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path}: not a checkpoint of this training: {_META} is missing or broken") from error
        for name, value in self._settings.items():
            if json.loads(json.dumps(value)) != saved.get(name):
                raise InputError(
                    f"{path}: was saved with {name} = {saved.get(name)!r}, but this training has {value!r}: use the "
                    "same options, or another --checkpoints folder"
                )


def _complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    return sorted(int(m.group(1)) for path in folder.iterdir() if (m := _COMPLETE.fullmatch(path.name)))


def _sync(folder: Path, recurse: bool = True) -> None:
    """Flush a folder's files, and the folder, to disk. Another rank's files may come and go meanwhile."""
    paths = list(folder.rglob("*")) if recurse else []
    for path in (*paths, folder):
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
