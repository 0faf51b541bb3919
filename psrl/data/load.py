"""From sample files to samples, whatever kind of row they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike

from psrl.data.chat import ChatConverter
from psrl.data.rows import Row, read_rows
from psrl.data.samples import ReplaySample, parse_sample
from psrl.data.tokenizer import ChatTokenizer
from psrl.errors import InputError


@dataclass(frozen=True)
class LoadedSamples:
    """Samples in input order."""

    samples: tuple[ReplaySample, ...]
    num_rows: int
    """Rows read."""
    rows_without_samples: tuple[str, ...]
    """``file:line`` of chat rows in which the assistant says nothing."""


def load_samples(
    paths: Sequence[str | PathLike[str]],
    *,
    tokenizer: Callable[[], ChatTokenizer],
    mode: str = "step",
    limit: int | None = None,
) -> LoadedSamples:
    """Read every row of every file: token samples (``input_ids``) or chat rows (``messages``), also mixed.

    Args:
        tokenizer: called once, at the first chat row.
        mode: ``step`` or ``trajectory``, for chat rows.
        limit: stop after that many rows over all files; later ones are not looked at.

    Raises:
        InputError: a file or row is malformed, or no sample is left; names file and line.
    """
    samples: list[ReplaySample] = []
    silent: list[str] = []
    converter: ChatConverter | None = None
    num_rows = 0
    with contextlib.closing(_rows_of_all(paths)) as rows:
        for row in islice(rows, limit):
            num_rows += 1
            if "input_ids" in row.values:
                samples.append(parse_sample(row))
            elif "messages" in row.values:
                converter = converter or ChatConverter(tokenizer(), mode)
                converted = converter.convert(row)
                samples += converted
                if not converted:
                    silent.append(row.where)
            else:
                raise InputError(f"{row.where}: the row has neither input_ids (a token sample) nor messages (a chat)")
    if not samples:
        names = ", ".join(map(str, paths))
        reason = f"none of the {num_rows} rows has an assistant message" if num_rows else "no rows in the file"
        raise InputError(f"{names}: no samples: {reason}")
    return LoadedSamples(tuple(samples), num_rows, tuple(silent))


def _rows_of_all(paths: Sequence[str | PathLike[str]]) -> Generator[Row, None, None]:
    for path in paths:
        with contextlib.closing(read_rows(path)) as rows:
            yield from rows
