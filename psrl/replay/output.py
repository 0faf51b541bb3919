"""Files that a replay leaves behind. Each appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from psrl.errors import InputError
from psrl.files import check_folder, json_text, reported, staged_text, umask
from psrl.files import check_targets as check_files

SAMPLES, GRADS, SUMMARY = "samples.safetensors", "grads.safetensors", "summary.json"
_DUMP_FILES = {SAMPLES, GRADS, SUMMARY}
_MARKER = "psrl_version"
"""Key of every summary."""


def check_targets(dump: Path | None, json_file: Path | None, inputs: Sequence[Path] = ()) -> None:
    """Check, before anything runs, that the results can be written.

    Args:
        inputs: files that are read, which a result must not replace.

    Raises:
        InputError: the folder around a target is missing or not writable, or the target is something else already.
    """
    if dump is not None:
        check_folder("--dump", dump)
    check_files({"--json": json_file}, inputs)
    if dump is not None and (dump.exists() or dump.is_symlink()):
        if not dump.is_dir() or dump.is_symlink():
            raise InputError(f"--dump {dump}: exists and is not a folder")
        others = sorted(entry.name for entry in dump.iterdir() if entry.name not in _DUMP_FILES)
        if others:
            raise InputError(f"--dump {dump}: the folder holds {others[0]!r}, which is no part of a dump: name another")
        _check_earlier_dump(dump)
    if json_file is not None and dump is not None:
        target, folder = json_file.resolve(), dump.resolve()
        if target == folder or folder in target.parents:
            raise InputError(f"--json {json_file}: is the --dump folder or inside it, which is replaced as a whole")


def _check_earlier_dump(dump: Path) -> None:
    """Whoever wrote the files of these names: only a dump is replaced."""
    entries = list(dump.iterdir())
    for entry in entries:
        if entry.is_symlink() or not entry.is_file():
            raise InputError(f"--dump {dump}: {entry.name!r} in it is no regular file, so it is no dump: name another")
    if not entries:
        return
    try:
        summary = json.loads((dump / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict) or _MARKER not in summary:
        raise InputError(f"--dump {dump}: the folder has no {SUMMARY} of an earlier dump: name another")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write or replace a JSON file. Numbers that JSON has no words for (NaN, infinity) become null."""
    with staged_json(path, values):
        pass


@contextlib.contextmanager
def staged_json(path: Path, values: Mapping[str, Any]) -> Iterator[None]:
    """Write the file beside its place, and move it there if the body succeeds: one result does not come alone."""
    with reported("--json", path), staged_text(path, json_text(values)):
        yield


def write_dump(
    path: Path, sample_values: Mapping[str, Any], gradients: Mapping[str, Any], summary: Mapping[str, Any]
) -> None:
    """Write a dump folder, or replace an earlier dump.

    Args:
        sample_values: tensors of ``samples.safetensors`` by name.
        gradients: tensors of ``grads.safetensors`` by name.
        summary: values of ``summary.json``.
    """
    from safetensors.torch import save_file

    with reported("--dump", path):
        staging = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
        try:
            save_file({name: value.contiguous() for name, value in sample_values.items()}, staging / SAMPLES)
            save_file({name: value.contiguous() for name, value in gradients.items()}, staging / GRADS)
            (staging / SUMMARY).write_text(json_text(summary), encoding="utf-8")
            staging.chmod(0o777 & ~umask())
            _replace_folder(staging, path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _replace_folder(staging: Path, path: Path) -> None:
    if not path.exists():
        staging.rename(path)
        return
    check_targets(path, None)
    previous = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    path.rename(previous)  # onto the empty folder
    try:
        staging.rename(path)
    except BaseException:
        previous.rename(path)
        raise
    shutil.rmtree(previous)
