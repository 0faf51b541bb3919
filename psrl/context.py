"""Context parallelism: which ranks compute which tokens of a micro-batch, and which hold what of a cached block.

Every rank of a context-parallel group has the same plan. Of each micro-batch it computes an equal number of tokens,
chosen so that the visible pairs of their queries are balanced; of each cached block it stores an even shard. A gather
over the group brings ``[shards of the path | tokens]`` of every rank, from which each takes the keys in their order.

Shape legend: C ranks, T tokens of a micro-batch, padding at its end included, t = T / C those of a rank, P path tokens,
s path tokens that a rank stores, n tokens of the micro-batch's own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psrl.types import IntArray

CHUNKS_PER_RANK = 8
"""Runs of neighbouring tokens that a rank gets about: more balance better, fewer make larger attention tiles."""


class Tap(NamedTuple):
    """Where a rank's shards of a micro-batch's own blocks lie."""

    rows: IntArray
    """Rows of the shards, one after the other, that hold a token."""
    tokens: IntArray
    """Their tokens, as indices into the micro-batch."""


def shard_size(num_tokens: int, num_ranks: int) -> int:
    """Rows that a rank stores of a block; the last shards may hold fewer tokens, or none."""
    return -(-num_tokens // num_ranks)


def query_pairs(first_S: IntArray, last_S: IntArray, num_queries: int) -> IntArray:
    """[T] keys that each query sees, where key s is visible to the queries ``first_S[s] <= q < last_S[s]``."""
    starting, ending = (np.bincount(x, minlength=num_queries + 1) for x in (first_S, last_S))
    return np.cumsum(starting - ending)[:num_queries]


def deal_tokens(pairs_T: IntArray, num_ranks: int) -> IntArray:
    """[C, t] ascending tokens of each rank: equally many, their pairs as equal as whole chunks allow.

    The chunk with most pairs goes to the rank with fewest so far that has room; what does not fit goes back.

    Args:
        pairs_T: pairs of each token; T is a multiple of ``num_ranks``.
    """
    num_each = len(pairs_T) // num_ranks
    size = max(1, shard_size(num_each, CHUNKS_PER_RANK))
    total = np.concatenate([[0], np.cumsum(pairs_T)])
    chunks = [(start, min(start + size, len(pairs_T))) for start in range(0, len(pairs_T), size)]
    chunks.sort(key=lambda c: int(total[c[0]] - total[c[1]]))
    parts: list[list[IntArray]] = [[] for _ in range(num_ranks)]
    room, work = [num_each] * num_ranks, [0] * num_ranks
    while chunks:
        start, end = chunks.pop(0)
        rank = min((r for r in range(num_ranks) if room[r]), key=lambda r: (work[r], r))
        cut = min(end, start + room[rank])
        parts[rank].append(np.arange(start, cut))
        room[rank] -= cut - start
        work[rank] += int(total[cut] - total[start])
        if cut < end:
            chunks.insert(0, (cut, end))
    return np.stack([np.sort(np.concatenate(part)) for part in parts])


def key_sources(tokens_Ct: IntArray, path_sizes: Sequence[int]) -> IntArray:
    """[P + T] row of every key, path first, in the gathered ``[shards of the path | tokens]`` of all ranks.

    Args:
        path_sizes: tokens of the path's blocks.
    """
    num_ranks, num_tokens = tokens_Ct.shape
    shards = [shard_size(n, num_ranks) for n in path_sizes]
    num_stored = sum(shards)
    num_rows = num_stored + num_tokens
    sources, start = [np.empty(0, dtype=np.int64)], 0
    for size, shard in zip(path_sizes, shards, strict=True):
        rank, row = np.divmod(np.arange(size), shard)
        sources.append(rank * num_rows + start + row)
        start += shard
    local_T = np.empty(tokens_Ct.size, dtype=np.int64)
    local_T[tokens_Ct] = num_stored + np.arange(num_ranks)[:, None] * num_rows + np.arange(num_tokens)
    return np.concatenate([*sources, local_T])


def own_tap(own_sizes: Sequence[int], rank: int, num_ranks: int) -> Tap:
    """What ``rank`` stores of the blocks that hold a micro-batch's tokens, one block after the other."""
    rows, tokens = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    row = token = 0
    for size in own_sizes:
        shard = shard_size(size, num_ranks)
        stored = np.arange(min(rank * shard, size), min((rank + 1) * shard, size))
        rows.append(row + np.arange(len(stored)))
        tokens.append(token + stored)
        row, token = row + shard, token + size
    return Tap(np.concatenate(rows), np.concatenate(tokens))
