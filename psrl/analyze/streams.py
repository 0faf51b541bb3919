"""Rows as streams: token sequences of which samples are prefixes.

A conversation in step mode is one stream, and its steps are places to stop in it, so a history that every step repeats
is held once. Shape legend: N tokens of a stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike

import numpy as np

from psrl.data import ChatTokenizer, ReplaySample
from psrl.data.chat import ChatConverter
from psrl.data.rows import Row, read_rows
from psrl.data.samples import parse_sample
from psrl.errors import InputError
from psrl.types import BoolArray, IntArray

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


@dataclass(frozen=True, slots=True)
class Stream:
    """Samples ``keys_N[:ends[0]]``, ``keys_N[:ends[1]]``, …, shortest first. They come from one row."""

    where: str
    """``file:line``."""
    keys_N: IntArray
    """Equal exactly where token id and position are."""
    mask_N: BoolArray
    """Tokens that may be targets; sample i trains those in ``[target_begins[i], ends[i])``."""
    ends: tuple[int, ...]
    target_begins: tuple[int, ...]
    uid: str
    """Prompt; empty where the row names none."""
    session: str
    """Trajectory; empty where the row names none."""
    first_index: int
    """Step of the first sample within the session; the others follow."""

    @property
    def num_samples(self) -> int:
        return len(self.ends)

    def part(self, start: int, stop: int) -> Stream:
        """Samples ``[start, stop)`` alone, with their targets."""
        end = self.ends[stop - 1]
        mask_N = self.mask_N[:end].copy()
        mask_N[: self.target_begins[start]] = False
        return Stream(
            self.where, self.keys_N[:end], mask_N, self.ends[start:stop], self.target_begins[start:stop], self.uid,
            self.session, self.first_index + start,
        )  # fmt: skip


def keys_of(token_ids_N: IntArray, position_ids_N: IntArray) -> IntArray:
    """Position in the upper half, token id in the lower."""
    return (position_ids_N << _TOKEN_BITS) | token_ids_N


def tokens_of(keys_N: IntArray) -> IntArray:
    """Token ids of keys."""
    return keys_N & _TOKEN_MASK


def positions_of(keys_N: IntArray) -> IntArray:
    """Positions of keys."""
    return keys_N >> _TOKEN_BITS


class _StepStreams(ChatConverter):
    """Conversations as one stream each, where ``convert`` would make a list of tokens for every step."""

    def stream(self, row: Row) -> Stream | None:
        """None where the assistant says nothing. Raises what ``convert`` raises."""
        if self._mode == "trajectory":
            samples = self.convert(row)
            return _whole(samples[0].where, samples) if samples else None
        first = self._up_to_first_response(row)
        if first is None:
            return None
        pieces: list[IntArray] = []
        targets: list[tuple[int, int]] = []
        length = 0
        for message in self.messages(row):
            begin = length + len(message.header)
            end = begin + len(message.body)
            if message.is_response:
                targets.append((begin, end))
            pieces += [np.asarray(x, dtype=np.int64) for x in (message.header, message.body, message.footer) if x]
            length = end + len(message.footer)
        ids_N = np.concatenate(pieces)[: targets[-1][1]]
        mask_N = np.zeros(len(ids_N), dtype=np.bool_)
        for begin, end in targets:
            mask_N[begin:end] = True
        return Stream(
            where=row.where,
            keys_N=keys_of(ids_N, np.arange(len(ids_N), dtype=np.int64)),
            mask_N=mask_N,
            ends=tuple(end for _, end in targets),
            target_begins=tuple(begin for begin, _ in targets),
            uid=first[0],
            session=first[1],
            first_index=0,
        )

    def _up_to_first_response(self, row: Row) -> tuple[str, str] | None:
        """uid and session, once the first sample has been checked as ``convert`` checks it."""
        messages = row.values["messages"]
        if isinstance(messages, list):
            for number, message in enumerate(messages):
                if isinstance(message, dict) and message.get("role") == "assistant":
                    row = Row(row.where, {**row.values, "messages": messages[: number + 1]})
                    break
        samples = self.convert(row)
        return (samples[0].uid, samples[0].session) if samples else None


def _whole(where: str, samples: Sequence[ReplaySample]) -> Stream:
    """A stream of one sample."""
    (sample,) = samples
    return Stream(
        where=where,
        keys_N=keys_of(sample.input_ids_N, sample.position_ids_N),
        mask_N=sample.loss_mask_N,
        ends=(sample.num_tokens,),
        target_begins=(0,),
        uid=sample.uid,
        session=sample.session,
        first_index=sample.index,
    )


@dataclass(slots=True)
class ReadCounts:
    """What a reader has seen so far."""

    rows: int = 0
    chat_rows: int = 0
    silent_rows: int = 0
    """Chat rows in which the assistant says nothing."""


def read_streams(
    paths: Sequence[str | PathLike[str]],
    *,
    tokenizer: Callable[[], ChatTokenizer],
    mode: str = "step",
    limit: int | None = None,
    counts: ReadCounts | None = None,
) -> Iterator[Stream]:
    """Yield the streams of all rows in order, one row in memory at a time: token samples or chat rows, also mixed.

    Args:
        tokenizer: called once, at the first chat row.
        mode: ``step`` or ``trajectory``, for chat rows.
        limit: stop after that many rows over all files.
        counts: filled in while reading.

    Raises:
        InputError: a file or row is malformed; names file and line.
    """
    counts = counts or ReadCounts()
    converter: _StepStreams | None = None
    for row in islice(_rows(paths), limit):
        counts.rows += 1
        if "input_ids" in row.values:
            yield _whole(row.where, [parse_sample(row)])
        elif "messages" in row.values:
            counts.chat_rows += 1
            converter = converter or _StepStreams(tokenizer(), mode)
            stream = converter.stream(row)
            if stream is None:
                counts.silent_rows += 1
            else:
                yield stream
        else:
            raise InputError(f"{row.where}: the row has neither input_ids (a token sample) nor messages (a chat)")


def _rows(paths: Sequence[str | PathLike[str]]) -> Iterator[Row]:
    for path in paths:
        with contextlib.closing(read_rows(path)) as rows:
            yield from rows


def cut(streams: Iterable[Stream], size: int | None) -> Iterator[tuple[Stream, bool]]:
    """Cut the samples, in order, into mini-batches of ``size`` (None: all in one), if need be between two of a stream.

    Yields every part with whether a mini-batch ends with it. The last one may be shorter, and its end is not marked.
    """
    room = size
    for stream in streams:
        start = 0
        while room is not None and stream.num_samples - start >= room:
            yield stream.part(start, start + room), True
            start, room = start + room, size
        if start < stream.num_samples:
            yield (stream.part(start, stream.num_samples) if start else stream), False
            room = None if room is None else room - (stream.num_samples - start)
