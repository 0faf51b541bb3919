"""Rows of a jsonl or jsonl.gz file, each with the place it came from."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from psrl.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


class Row(NamedTuple):
    """One JSON object of a file."""

    where: str
    """``file:line``, for messages."""
    values: dict[str, Any]


def read_rows(path: str | PathLike[str]) -> Generator[Row, None, None]:
    """Yield the JSON objects of a file in order; blank lines are no rows. Compression is told by content.

    Raises:
        InputError: the file cannot be read or decompressed, or a line is not a JSON object; names file and line.
    """
    path = Path(path)
    line_number = 0
    try:
        with _open(path) as stream:
            for line_number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _parse(line, f"{path}:{line_number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}:{line_number + 1}: the gzip stream is broken or truncated ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read the file: {error.strerror or error}") from error


def _open(path: Path) -> gzip.GzipFile | BufferedReader:
    with path.open("rb") as stream:
        compressed = stream.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if compressed or path.suffix == ".gz" else path.open("rb")


def _parse(line: bytes, where: str) -> Row:
    try:
        values = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: broken JSON row: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise InputError(f"{where}: broken JSON row: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: a row must be a JSON object, got {type(values).__name__}")
    return Row(where, values)
