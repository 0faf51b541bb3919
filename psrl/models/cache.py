"""Folders that are made once and kept in the cache folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from psrl.errors import InputError
from psrl.files import cache_dir


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` in the cache; ``make`` fills it where it is missing.

    It appears whole or not at all, also where several processes make it at once.

    Raises:
        InputError: the cache is not writable.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise InputError(f"{target.parent}: cannot write: {error.strerror or error}: set PSRL_CACHE") from error
    try:
        make(staging)
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():  # or another process was faster
                raise
    except OSError as error:
        raise InputError(f"{target}: cannot write: {error.strerror or error}: set PSRL_CACHE") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target
