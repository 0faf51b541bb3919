"""Files that commands leave behind, each whole or not at all, and the folder of what is made once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

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
            with reported(flag, path):
                _check_target(flag, path, taken)


def check_folder(flag: str, path: Path) -> None:
    """Check that ``path`` could be made where it is to be.

    Raises:
        InputError: its folder is missing or not writable.
    """
    parent = path.absolute().parent
    if not parent.is_dir():
        raise InputError(f"{flag} {path}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{flag} {path}: the folder {parent} is not writable")


def _check_target(flag: str, path: Path, taken: dict[Path, str]) -> None:
    check_folder(flag, path)
    if path.is_dir():
        raise InputError(f"{flag} {path}: is a folder")
    resolved = path.resolve()
    if resolved in taken:
        raise InputError(f"{flag} {path}: is {taken[resolved]}")
    taken[resolved] = f"also the {flag} file"


@contextlib.contextmanager
def reported(flag: str, path: Path) -> Generator[None]:
    """Around what writes ``path``, which a user named by ``flag``.

    Raises:
        InputError: an ``OSError`` of the body.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot write: {error.strerror or error}") from error


def write_json(flag: str, path: Path, values: Any) -> None:
    """Write or replace a JSON file. Numbers that JSON has no words for (NaN, infinity) become null.

    Raises:
        InputError: the file cannot be written; names the flag.
    """
    write_text(flag, path, json_text(values))


def json_text(values: Any) -> str:
    """JSON with null for numbers that JSON has no words for (NaN, infinity)."""
    return json.dumps(_finite(values), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value)
        return {key: _finite(item) for key, item in pairs.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(flag: str, path: Path, text: str) -> None:
    """Write or replace a text file as ``staged_text`` does.

    Raises:
        InputError: the file cannot be written; names the flag.
    """
    with reported(flag, path), staged_text(path, text):
        pass


@contextlib.contextmanager
def staged_text(path: Path, text: str) -> Generator[None]:
    """Write the file beside its place, and move it there if the body succeeds: one result does not come alone.

    UTF-8; half a surrogate pair, as of a file name that is no text, is escaped. Raises what writing raises.
    """
    if path.exists() and not path.is_file():  # a pipe or a device: nothing to replace
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        yield
        return
    descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.chmod(name, 0o666 & ~umask())
        yield
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cache_dir() -> Path:
    """``PSRL_CACHE``, else ``$XDG_CACHE_HOME/psrl``, else ``~/.cache/psrl``. Not created here.

    Raises:
        InputError: there is no home folder either.
    """
    if value := os.environ.get("PSRL_CACHE"):
        return Path(value).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "psrl"
    try:
        return Path.home() / ".cache" / "psrl"
    except RuntimeError as error:
        raise InputError(f"no cache folder: {error}: set PSRL_CACHE") from error
