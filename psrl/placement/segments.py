"""What the rows of a batch share, as segments. Rows on one cell cost the sum over their distinct segments.

Shape legend: S rows, V segments, N tokens of all rows, U unique tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.tree import build_tree
from psrl.types import FloatArray, IntArray, SampleBatch

PAIR_WEIGHT = 1e-4
"""Work of one visible (query, key) pair over that of a token's GEMMs: about 2 / (6 * hidden size + ffn size) of a dense
decoder, which is 1e-4 at a hidden size of 2,000 and only grows in importance for long contexts."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of tokens that the same rows hold."""

    weight_V: FloatArray
    """Work of computing a segment once, in tokens."""
    rows: tuple[IntArray, ...]
    """Segments of every row."""

    def workload(self, rows: IntArray) -> float:
        """Effective workload of some rows that share one cell."""
        return float(self.weight_V[self.of(rows)].sum())

    def of(self, rows: IntArray) -> IntArray:
        """Distinct segments of some rows, ascending."""
        if not len(rows):
            return np.empty(0, dtype=np.int64)
        return np.unique(np.concatenate([self.rows[row] for row in rows.tolist()]))


def tokens_work(begin: Any, end: Any) -> Any:
    """Work of tokens [begin, end) of a sequence, numbers or arrays: a token each, and a pair for every key it sees."""
    return (end - begin) + PAIR_WEIGHT * (end * (end + 1) - begin * (begin + 1)) / 2


def segments_from_tokens(token_ids: Sequence[IntArray], position_ids: Sequence[IntArray] | None = None) -> Segments:
    """Exact segments, from the token ids of every row (positions count from 0 if not given)."""
    lengths = np.asarray([len(ids) for ids in token_ids], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    positions = position_ids or [np.arange(length, dtype=np.int64) for length in lengths.tolist()]
    tree = build_tree(
        SampleBatch(
            token_ids_N=np.concatenate(token_ids).astype(np.int64),
            position_ids_N=np.concatenate(positions).astype(np.int64),
            cu_seqlens=cu_seqlens,
            target_mask_N=np.zeros(num_tokens, dtype=bool),
            group_ids_S=np.arange(len(lengths), dtype=np.int64),
            temperatures_S=np.ones(len(lengths)),
        )
    )
    # A segment begins at a root, after a fork, and where a row has ended.
    starts_U = np.zeros(tree.num_tokens, dtype=bool)
    starts_U[tree.parent_U != np.arange(-1, tree.num_tokens - 1)] = True
    num_children_U = np.bincount(tree.parent_U[tree.parent_U >= 0], minlength=tree.num_tokens)
    closes_U = num_children_U > 1
    closes_U[tree.index_N[cu_seqlens[1:] - 1]] = True
    starts_U[1:] |= closes_U[:-1]
    starts_U[0] = True
    segment_U = np.cumsum(starts_U) - 1
    begin = np.flatnonzero(starts_U)
    end = np.append(begin[1:], tree.num_tokens)
    first_depth = tree.depth_U[begin].astype(float)
    weight_V = tokens_work(first_depth, first_depth + (end - begin))
    rows = tuple(
        np.unique(segment_U[tree.index_N[cu_seqlens[row] : cu_seqlens[row + 1]]]) for row in range(len(lengths))
    )
    return Segments(weight_V, rows)


def segments_from_lengths(
    keys: Sequence[tuple[str, str, int]], tags: Sequence[Mapping[str, Any]], is_padding_S: np.ndarray
) -> Segments:
    """An estimate from the lengths alone, without any token.

    The rows of a trajectory are taken to extend each other where they can: row k + 1 holds row k if its prompt is at
    least as long as row k. The prompts of the first rows of a prompt's trajectories are taken to be the same.
    """
    weights: list[float] = []
    rows: list[list[int]] = [[] for _ in keys]

    def add(begin: int, end: int) -> int:
        weights.append(float(tokens_work(begin, end)))
        return len(weights) - 1

    opening: dict[str, tuple[int, int]] = {}  # uid: segment of the common prompt, its length
    previous: dict[tuple[str, str], tuple[int, list[int]]] = {}  # trajectory: length and segments of its last row
    padding = -1  # segment of the padding rows, which all have the same tokens
    for row in sorted(range(len(keys)), key=lambda row: keys[row]):
        uid, session, _ = keys[row]
        prompt, length = int(tags[row]["prompt_len"]), int(tags[row]["seq_len"])
        if is_padding_S[row]:
            padding = padding if padding >= 0 else add(0, length)
            rows[row] = [padding]
            continue
        before, held = previous.get((uid, session), (0, []))
        if held and before <= prompt:
            rows[row] = [*held, add(before, length)]
        else:
            segment, common = opening.setdefault(uid, (-1, prompt))
            if segment < 0:
                segment = add(0, common)
                opening[uid] = (segment, common)
            rows[row] = [segment, add(common, length)] if common <= prompt else [add(0, length)]
        previous[uid, session] = (length, rows[row])
    return Segments(np.asarray(weights), tuple(np.asarray(r, dtype=np.int64) for r in rows))
