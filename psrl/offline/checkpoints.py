"""Checkpoints of an offline training: whole or not loaded (``durable_checkpoint``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from psrl.errors import InputError
from psrl.integrations.verl.trainer.durable_checkpoint import (
    begin,
    find_latest,
    prune,
    publish,
    read_manifest,
    seal,
    step_folder,
)
from psrl.offline.options import OfflineOptions
from psrl.offline.processes import Processes

_SAME = ("objective", "batch", "mini_batch", "seed", "limit", "mode", "dtype", "distributed_optimizer", "layout")
"""Options that decide which rows a step has, or how the state is cut over ranks."""


class Checkpoints:
    """Every method is collective."""

    def __init__(self, options: OfflineOptions, worker: Any, processes: Processes, say: Callable[[str], None]) -> None:
        self._options, self._worker, self._processes, self._say = options, worker, processes, say
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
        """Load the last whole checkpoint; returns its step, 0 if there is none to load.

        Raises:
            InputError: the folder is not usable, holds checkpoints that are not to be resumed, or one of another
                training.
        """
        root = self._options.checkpoints
        if root is None:
            return 0
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--checkpoints {root}: {error.strerror or error}") from error
        found = find_latest(root)
        if self._processes.rank == 0:
            for reason in found.skipped:
                self._say(f"not resumed from: {reason}")
        if found.folder is None:
            return 0
        if self._options.resume == "never":
            raise InputError(
                f"--checkpoints {root} holds {found.folder.name}: name another folder, or use --resume auto"
            )
        manifest = read_manifest(found.folder)
        self._check(found.folder, manifest["trainer_state"])
        self._worker.load_checkpoint(str(found.folder), del_local_after_load=False)
        self._last = manifest["global_step"]
        return self._last

    def save(self, step: int) -> None:
        """Write a checkpoint, and remove what is older than ``--keep`` of them."""
        root, is_first = self._options.checkpoints, self._processes.rank == 0
        assert root is not None
        folder = step_folder(root, step)
        if is_first:
            begin(folder)
        dist.barrier()
        self._worker.save_checkpoint(str(folder), global_step=step)
        dist.barrier()
        if is_first:
            seal(folder, step, self._settings)
            publish(root, step)
            if self._options.keep is not None:
                prune(root, step, self._options.keep)
        dist.barrier()
        self._last = step

    def _check(self, folder: Path, saved: dict[str, Any]) -> None:
        for name, value in self._settings.items():
            if json.loads(json.dumps(value)) != saved.get(name):
                raise InputError(
                    f"{folder}: was saved with {name} = {saved.get(name)!r}, but this training has {value!r}: use the "
                    "same options, or another --checkpoints folder"
                )
