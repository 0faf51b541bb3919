"""Fingerprints of a row's prefixes: what rows share, in a tag of a few bytes per hundred tokens.

A row's tag holds hashes of its first n tokens for several n: multiples of a stride, where its prompt and the row end,
and every place where a row of the same trajectory leaves it. Two rows share what the longest common hash says: exactly,
within a trajectory; else up to the stride. Hashes decide where rows go, never what is shared: the engine compares
tokens, so that equal hashes of different prefixes cost time at most.

Shape legend: S rows, N nodes (distinct prefixes with a hash), V segments, E hashes of all rows.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from psrl.errors import ConfigError
from psrl.placement.segments import Segments, tokens_work
from psrl.types import IntArray

TAG = "psrl_prefixes"
_ENTRY = np.dtype([("length", "<u4"), ("hash", "<u8")])


def fingerprint_tags(token_ids: Sequence[IntArray], prompt_lengths: Sequence[int], stride: int) -> list[dict[str, str]]:
    """Tags of the rows of one trajectory.

    Args:
        token_ids: of every row.
        prompt_lengths: tokens before each row's response.
        stride: tokens from one hash to the next.
    """
    ids = [np.asarray(row, dtype="<i4") for row in token_ids]
    forks = _forks(ids)
    tags = []
    for row, prompt, places in zip(ids, prompt_lengths, forks, strict=True):
        strides = np.arange(stride, len(row), stride)
        lengths = np.unique(np.concatenate([strides, places, [prompt, prompt_lengths[0], len(row)]]).astype(np.int64))
        tags.append({TAG: _encode(row, lengths[(lengths > 0) & (lengths <= len(row))])})
    return tags


def _forks(ids: Sequence[IntArray]) -> list[IntArray]:
    """Lengths of what each row shares with the others."""
    if len(ids) == 1:
        return [np.empty(0, dtype=np.int64)]
    # Big-endian bytes sort like the tokens: what two rows share is the least that neighbours between them do.
    packed = [row.astype(">i4").tobytes() for row in ids]
    order = sorted(range(len(ids)), key=packed.__getitem__)
    shared = np.array([_common(ids[a], ids[b]) for a, b in pairwise(order)])
    found: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(ids)
    for place, row in enumerate(order):
        right, left = np.minimum.accumulate(shared[place:]), np.minimum.accumulate(shared[:place][::-1])
        found[row] = np.unique(np.concatenate([left, right]))
    return found


def _common(one: IntArray, two: IntArray) -> int:
    length = min(len(one), len(two))
    differs = np.flatnonzero(one[:length] != two[:length])
    return int(differs[0]) if len(differs) else length


def _encode(row: IntArray, lengths: IntArray) -> str:
    entries = np.empty(len(lengths), dtype=_ENTRY)
    entries["length"] = lengths
    data, digest, done = row.tobytes(), hashlib.blake2b(digest_size=8), 0
    for index, length in enumerate(lengths.tolist()):
        digest.update(data[4 * done : 4 * length])
        entries["hash"][index] = int.from_bytes(digest.digest(), "little")
        done = length
    return base64.b64encode(entries.tobytes()).decode("ascii")


def segments_from_fingerprints(
    row_keys: Sequence[str], tags: Sequence[Mapping[str, Any]], is_padding_S: np.ndarray
) -> Segments:
    """What the rows share, from their tags. Padding rows all have the same tokens.

    Raises:
        ConfigError: a row has no fingerprints.
    """
    missing = [key for key, tag, padding in zip(row_keys, tags, is_padding_S, strict=True) if not padding
               and not tag.get(TAG)]  # fmt: skip
    if missing:
        raise ConfigError(
            f"psrl.grouping=fingerprints: row {missing[0]} ({len(missing)} of {len(row_keys)}) has no tag {TAG}. The "
            "agent-loop worker of psrl.integrations.verl.trainer.agent_worker.PSRLAgentLoopManager writes it: set "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class to that class or a subclass, or psrl.grouping to "
            "uid, session or tokens"
        )
    real = np.flatnonzero(~is_padding_S).tolist()
    entries = [np.frombuffer(base64.b64decode(tags[row][TAG]), dtype=_ENTRY) for row in real]
    length_N, node_E = _nodes(np.concatenate([*entries, np.empty(0, dtype=_ENTRY)]))
    last_E = np.cumsum([len(row) for row in entries], dtype=np.int64) - 1
    parent_N = _parents(length_N, node_E, last_E)
    weights, paths = _segments(length_N, parent_N, node_E[last_E])
    rows: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(row_keys)
    for row, path in zip(real, paths, strict=True):
        rows[row] = np.asarray(path, dtype=np.int64)
    padding = np.flatnonzero(is_padding_S).tolist()
    if padding:
        for row in padding:
            rows[row] = np.array([len(weights)])
        weights.append(float(tokens_work(0, int(tags[padding[0]]["seq_len"]))))
    return Segments(np.asarray(weights), tuple(rows))


def _nodes(entries_E: np.ndarray) -> tuple[IntArray, IntArray]:
    """Lengths of the distinct prefixes, and which one each entry is."""
    order = np.lexsort((entries_E["hash"], entries_E["length"]))
    ordered = entries_E[order]
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    node_E = np.empty(len(ordered), dtype=np.int64)
    node_E[order] = np.cumsum(is_new) - 1
    return ordered["length"][is_new].astype(np.int64), node_E


def _parents(length_N: IntArray, node_E: IntArray, last_E: IntArray) -> IntArray:
    """[N] the longest shorter prefix of each prefix, -1 at a root. Nodes are numbered by length.

    Rows have hashes at different places. All of them before a prefix, whichever row has them, are on one path: the
    longest is its parent, and the others come before that one.
    """
    is_first_E = np.zeros(len(node_E), dtype=bool)
    is_first_E[np.concatenate([[0], last_E[:-1] + 1])[: len(last_E)]] = True
    follows = np.flatnonzero(~is_first_E)
    pairs = np.unique(np.stack([node_E[follows], node_E[follows - 1]], axis=1), axis=0)
    before: dict[int, set[int]] = {}
    for node, previous in pairs.tolist():
        before.setdefault(node, set()).add(previous)
    parent_N = np.full(len(length_N), -1, dtype=np.int64)
    for node in range(len(length_N) - 1, -1, -1):
        if candidates := before.pop(node, None):
            parent = max(candidates)
            parent_N[node] = parent
            # Of equal length only if hashes collide: then the rows part here as far as placement goes.
            others = {other for other in candidates if length_N[other] < length_N[parent]}
            if others:
                before.setdefault(parent, set()).update(others)
    return parent_N


def _segments(length_N: IntArray, parent_N: IntArray, end_S: IntArray) -> tuple[list[float], list[list[int]]]:
    """Work of the segments, and those of every row from the root: nodes joined where no row forks or ends."""
    num_children_N = np.bincount(parent_N[parent_N >= 0], minlength=len(parent_N))
    closes_N = num_children_N != 1
    closes_N[end_S] = True
    above: list[int] = []  # segment before a segment
    bounds: list[list[int]] = []
    segment_N: list[int] = []
    for length, parent in zip(length_N.tolist(), parent_N.tolist(), strict=True):
        if parent >= 0 and not closes_N[parent]:
            segment_N.append(segment_N[parent])
            bounds[segment_N[-1]][1] = length
        else:
            segment_N.append(len(bounds))
            above.append(segment_N[parent] if parent >= 0 else -1)
            bounds.append([int(length_N[parent]) if parent >= 0 else 0, length])
    paths = []
    for node in end_S.tolist():
        path, segment = [], segment_N[node]
        while segment >= 0:
            path.append(segment)
            segment = above[segment]
        paths.append(path[::-1])
    return [float(tokens_work(begin, end)) for begin, end in bounds], paths
