"""Measurements of attention kernels, kept in the cache folder: a JSON file for each kind of thing they hold for."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from psrl import __version__
from psrl.errors import InputError
from psrl.files import cache_dir, staged_text
from psrl.runtime.attention.cached_layer import LayerShape

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

Kind = dict[str, Any]
"""What a measurement holds for, as JSON values. What it was measured ``with`` is not part of the file's name: with
other versions it is measured anew, and replaced."""
_PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4")
"""That bring kernels."""
_unwritten: dict[Path, str] = {}
"""Records that could not be written: engines that this process builds later run what was measured for the first."""


def records_folder() -> Path:
    return cache_dir() / "attention"


def check_records_folder() -> None:
    """Make the folder, for who measures to keep the result.

    Raises:
        InputError: it cannot be made or written to.
    """
    folder = records_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot make the folder ({error.strerror or error}): set PSRL_CACHE") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: the folder is not writable: set PSRL_CACHE")


def kind_of(what: str, shape: LayerShape, measured_with: Mapping[str, Any] | None = None, **more: Any) -> Kind:
    """``what`` was measured, on this device and with what is installed, for a dtype, head dims and ``more``."""
    versions = {"psrl": __version__, "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "what": what,
        "device": device_name(shape.device),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "head_dims": [shape.head_dim, shape.v_head_dim],
        **more,
        "with": versions | dict(measured_with or {}),
    }


def device_name(device: torch.device) -> str:
    """Of devices that have the same name kernels take equally long."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor}"


def read_record(kind: Kind, parse: Callable[[Any], _T]) -> _T | None:
    """What was measured; None: nothing, or with other versions. A file that is no record is logged and left out.

    Args:
        parse: from a record's values; raises a ``ValueError``, ``TypeError`` or ``KeyError`` where they are none.
    """
    path = _path(kind)
    try:
        record = json.loads(_unwritten.get(path) or path.read_text(encoding="utf-8"))
        return parse(record["values"]) if record["kind"] == kind else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is no measurement of attention (%s): left out", path, error)
        return None


def write_record(kind: Kind, values: dict[str, Any]) -> None:
    """Keep or replace a measurement. Where that cannot be, a warning says so, and this process alone remembers it."""
    path, text = _path(kind), json.dumps({"kind": kind, "values": values}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_text(path, text):
            pass
    except OSError as error:
        _unwritten[path] = text
        logger.warning("%s: cannot write (%s): it is measured at every start; set PSRL_CACHE", path, error)


def slug(text: str) -> str:
    """In lower case, with a hyphen for all but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _path(kind: Kind) -> Path:
    words = " ".join(str(value) for key, value in kind.items() if key != "with")
    return records_folder() / f"{slug(words)}.json"
