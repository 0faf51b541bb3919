"""Files that an analysis leaves behind. Each appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from psrl.errors import InputError


def check_targets(targets: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Check, before anything is read, that the results can be written.

    Args:
        targets: path by flag.
        inputs: files that are read, which a result must not replace.

    Raises:
        InputError: the folder of a target is missing or not writable, the target is a folder, an input or another
            target.
    """
    taken = {path.resolve(): "an input file" for path in inputs}
    for flag, path in targets.items():
        if path is not None:
            with _reported(flag, path):
                _check_target(flag, path, taken)


def _check_target(flag: str, path: Path, taken: dict[Path, str]) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise InputError(f"{flag} {path}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{flag} {path}: the folder {parent} is not writable")
    if path.is_dir():
        raise InputError(f"{flag} {path}: is a folder")
    resolved = path.resolve()
    if resolved in taken:
        raise InputError(f"{flag} {path}: is {taken[resolved]}")
    taken[resolved] = f"also the {flag} file"


@contextlib.contextmanager
def _reported(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot write: {error.strerror or error}") from error


def write_json(flag: str, path: Path, values: Any) -> None:
    """Write or replace a JSON file.

    Raises:
        InputError: the file cannot be written; names the flag.
    """
    write_text(flag, path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def write_text(flag: str, path: Path, text: str) -> None:
    """Write or replace a text file, UTF-8. Half a surrogate pair, as of a file name that is no text, is escaped.

    Raises:
        InputError: the file cannot be written; names the flag.
    """
    with _reported(flag, path):
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to replace
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".psrl.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
