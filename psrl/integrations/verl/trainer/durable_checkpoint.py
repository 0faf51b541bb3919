"""Checkpoints that are whole or are not loaded.

veRL writes a checkpoint into its final folder and then a tracker file that names it. Killed in between, or with the
retention of older ones under way, it leaves folders that look like checkpoints. Here a folder is a checkpoint once it
holds a manifest, which is written last, after everything else has reached the disk, and lists every file with its size;
what does not match its manifest is skipped by ``trainer.resume_mode=auto`` and refused by name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError, InputError

MANIFEST = "psrl_checkpoint.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""veRL's: the step that ``auto`` resumes from. May be edited to go back."""
FORMAT_VERSION = 1
_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """What ``auto`` resumes from."""

    folder: Path | None
    """None: from scratch."""
    skipped: tuple[str, ...]
    """Why newer ones, or the one that the tracker names, are not loaded; a sentence each."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None if it is not named as one."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


# ----------------------------------------------------------------------------------------------------------- writing
def begin(folder: Path) -> None:
    """Make room for a checkpoint: what an interrupted job, or one that was gone back on, left there goes."""
    remove(folder)


def seal(folder: Path, step: int, trainer_state: Mapping[str, Any] | None = None) -> None:
    """Make a written checkpoint a whole one: flush its files to the disk, then write the manifest.

    Args:
        trainer_state: what the trainer itself has to get back, JSON values only.

    Raises:
        InputError: the folder is not there, or empty.
    """
    files = _files(folder) if folder.is_dir() else {}
    if not files:
        raise InputError(f"{folder}: nothing was saved there")
    for name in files:
        _flush(folder / name)
    for directory in {folder / Path(name).parent for name in files}:
        _flush(directory)
    manifest = {
        "format_version": FORMAT_VERSION,
        "global_step": step,
        "saved_at": time.time(),
        "files": files,
        "trainer_state": dict(trainer_state or {}),
    }
    _write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    _flush(folder.parent)


def publish(root: Path, step: int) -> None:
    """Point the tracker at a step, at once: veRL's own writing of it can be seen half done."""
    _write_atomically(root / TRACKER, str(step))


def prune(root: Path, newest: int, keep: int) -> list[Path]:
    """Remove whole checkpoints before ``newest`` but the last ``keep - 1``; returns those removed.

    Only once the newest is published, so that there always is a whole one. Folders without a manifest are left alone.
    """
    older = sorted(
        (step, folder)
        for folder in _folders(root)
        if (step := step_of(folder)) is not None and step < newest and (folder / MANIFEST).is_file()
    )
    gone = [folder for _, folder in older[: max(0, len(older) - (keep - 1))]]
    for folder in gone:
        remove(folder)
    return gone


def remove(folder: Path) -> None:
    """The manifest first: a folder that is being removed is no checkpoint any more."""
    if folder.is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
        _flush(folder)
        shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------------------------- reading
def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint.

    Raises:
        InputError: it is not whole; says why.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, step, files = manifest["format_version"], manifest["global_step"], manifest["files"]
    except FileNotFoundError as error:
        raise InputError(f"{folder}: not saved to its end, or not by psrl's trainer (no {MANIFEST})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a manifest of a checkpoint") from error
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version is {version!r}, this version of psrl reads {FORMAT_VERSION}")
    if step != step_of(folder):
        raise InputError(f"{path}: is of step {step!r}, which the folder's name is not")
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"{folder}: {name} is missing")
        if file.stat().st_size != size:
            raise InputError(f"{folder}: {name} has {file.stat().st_size:,} bytes, but {size:,} were saved")
    return manifest


def find_latest(root: Path) -> Found:
    """The checkpoint to go on from: the one that the tracker names, or, where that is not whole, the one saved last."""
    reasons: list[str] = []
    named = _read_tracker(root, reasons)
    whole: dict[Path, float] = {}
    broken: dict[Path, str] = {}
    folders = _folders(root)
    if named is not None and step_folder(root, named) not in folders:
        reasons.append(f"{step_folder(root, named)}: no such folder, but {TRACKER} names it")
    for folder in folders:
        try:
            whole[folder] = float(read_manifest(folder)["saved_at"])
        except InputError as error:
            broken[folder] = str(error)
    if named is not None and step_folder(root, named) in whole:
        newer = [reason for folder, reason in broken.items() if (step_of(folder) or 0) > named]
        return Found(step_folder(root, named), (*reasons, *newer))
    return Found(max(whole, key=whole.__getitem__, default=None), (*reasons, *broken.values()))


def check_settings(get: Callable[[str], Any]) -> None:
    """Check a job's settings of checkpoints.

    Args:
        get: the value of a key of the job, None if it has none.

    Raises:
        ConfigError: as ``resume_folder``, or a setting under which nobody could tell that a checkpoint is whole.
    """
    for key in ("actor_rollout_ref.actor", "critic"):
        if get(f"{key}.checkpoint.async_save"):
            raise ConfigError(
                f"{key}.checkpoint.async_save=true: the trainer would not know when a checkpoint is whole: set it to "
                "false"
            )
    mode, root = get("trainer.resume_mode"), get("trainer.default_local_dir")
    if mode != "auto":
        resume_folder(mode, Path(root), get("trainer.resume_from_path"))


def resume_folder(mode: str, root: Path, resume_from: str | None) -> Found:
    """What ``trainer.resume_mode`` asks for.

    Args:
        mode: ``auto``, ``disable`` or ``resume_path``.
        root: ``trainer.default_local_dir``.
        resume_from: ``trainer.resume_from_path``.

    Raises:
        ConfigError: the mode is unknown, or the checkpoint that is named is not a whole one; names the key.
    """
    if mode == "disable":
        return Found(None, ())
    if mode == "auto":
        return find_latest(root)
    if mode != "resume_path":
        raise ConfigError(f"trainer.resume_mode must be auto, disable or resume_path, got {mode!r}")
    if not isinstance(resume_from, str) or step_of(Path(resume_from)) is None:
        raise ConfigError(f"trainer.resume_from_path must name a folder global_step_N, got {resume_from!r}")
    folder = Path(resume_from).absolute()
    try:
        read_manifest(folder)
    except InputError as error:
        raise ConfigError(f"trainer.resume_from_path: {error}") from error
    return Found(folder, ())


def _read_tracker(root: Path, skipped: list[str]) -> int | None:
    path = root / TRACKER
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if text.isdecimal():
        return int(text)
    skipped.append(f"{path}: not the number of a step: {text[:40]!r}")
    return None


def _folders(root: Path) -> list[Path]:
    return [folder for folder in sorted(root.glob("global_step_*")) if folder.is_dir() and step_of(folder) is not None]


def _files(folder: Path) -> dict[str, int]:
    """Sizes in bytes by the path below ``folder``."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _flush(path.parent)
