"""Replayed expert routes as part of the prefix: tokens share where they are sent to the same experts in every layer.

Each token gets the id of its route, which goes into the prefix tree with its token id and position. Two routes are the
same where every layer has the same experts, in whatever order they are listed: a layer adds up its experts' outputs.

Shape legend: N tokens of all samples, S samples, U unique tokens, R distinct routes, L layers that have
experts, K experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psrl.tree import PrefixTree, build_tree
from psrl.types import BoolArray, IntArray, SampleBatch

ExpertArray = NDArray[np.int16]
NATIVE = -1
"""Route of a token that the router itself sends to experts, and each expert of it."""

HashRows = Callable[[NDArray[np.uint64]], NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class SampleRoutes:
    """The route of every token."""

    ids_N: IntArray
    """Row of the table, or ``NATIVE``."""
    table_RLK: ExpertArray
    """Distinct routes; the experts of a layer are in ascending order."""


def number_routes(experts_NLK: ExpertArray, is_replayed_N: BoolArray) -> SampleRoutes:
    """Give equal routes equal ids. Exact: hashes group routes, which are then compared.

    Args:
        is_replayed_N: where the experts count; other tokens are ``NATIVE``.
    """
    replayed = experts_NLK if is_replayed_N.all() else experts_NLK[is_replayed_N]
    width = replayed.shape[1] * replayed.shape[2]
    # As they are listed first, then as sets: sorting the few that differ is cheaper than sorting all.
    first, listed = equal_rows(np.reshape(replayed, (len(replayed), width)))
    sets = np.sort(replayed[first], axis=-1)
    first_R, ids = equal_rows(np.reshape(sets, (len(sets), width)))
    ids_N = np.full(len(experts_NLK), NATIVE, dtype=np.int64)
    ids_N[is_replayed_N] = ids[listed]
    return SampleRoutes(ids_N, sets[first_R])


def with_routes(batch: SampleBatch, routes: SampleRoutes) -> SampleBatch:
    """The samples with routes as a part of their prefixes."""
    return dataclasses.replace(batch, extra_inputs_NK=routes.ids_N[:, None])


def share_last_tokens(batch: SampleBatch, routes: SampleRoutes) -> SampleRoutes:
    """Give a sample's last token, where it has no route, that of another sample's same token after the same prefix.

    Of its sample nothing depends on it: it predicts no target and no token comes after it. Without this it would be
    kept apart from the same token in the middle of a longer sample. Not for routers with losses or statistics, in which
    every token counts.
    """
    tree = build_tree(with_routes(batch, routes))
    last_S = batch.cu_seqlens[1:] - 1
    last_S = last_S[routes.ids_N[last_S] == NATIVE]
    parents = np.unique(tree.parent_U[tree.index_N[last_S]])
    ids_U = _of_unique(routes, tree.index_N)
    known: dict[tuple[int, int, int], int] = {}
    for token in np.flatnonzero((ids_U != NATIVE) & np.isin(tree.parent_U, parents)).tolist():
        known.setdefault(_place(tree, token), int(ids_U[token]))
    ids_N = np.copy(routes.ids_N)
    for position, token in zip(last_S.tolist(), tree.index_N[last_S].tolist(), strict=True):
        if tree.end_U[token] == token + 1:  # no other sample goes on from it
            ids_N[position] = known.get(_place(tree, token), NATIVE)
    return dataclasses.replace(routes, ids_N=ids_N)


def unique_experts(routes: SampleRoutes, index_N: IntArray) -> ExpertArray:
    """[U, L, K] experts of every unique token, ``NATIVE`` where the router decides.

    Args:
        index_N: unique token of every token.
    """
    ids_U = _of_unique(routes, index_N)
    experts_ULK = np.full((len(ids_U), *routes.table_RLK.shape[1:]), NATIVE, dtype=np.int16)
    is_replayed_U = ids_U != NATIVE
    experts_ULK[is_replayed_U] = routes.table_RLK[ids_U[is_replayed_U]]
    return experts_ULK


def _of_unique(routes: SampleRoutes, index_N: IntArray) -> IntArray:
    ids_U = np.empty(int(index_N.max(initial=-1)) + 1, dtype=np.int64)
    ids_U[index_N] = routes.ids_N  # equal wherever a token is shared
    return ids_U


def _place(tree: PrefixTree, token: int) -> tuple[int, int, int]:
    return int(tree.parent_U[token]), int(tree.token_ids_U[token]), int(tree.position_ids_U[token])


# --------------------------------------------------------------------------------------------------- equal rows
def equal_rows(rows: NDArray[np.int16], hash_rows: HashRows | None = None) -> tuple[IntArray, IntArray]:
    """Rows that are equal, by comparing each with the first of its hash. Those that only collide go another round.

    Returns:
        the first of each kind of row, and for every row its kind.
    """
    words = _words(rows)
    kinds = np.empty(len(rows), dtype=np.int64)
    firsts: list[IntArray] = []
    num_kinds, left = 0, np.arange(len(rows), dtype=np.int64)
    hashes = (hash_rows or _hash)(words)
    while len(left):
        _, first, inverse = np.unique(hashes[left], return_index=True, return_inverse=True)
        inverse = np.ravel(inverse)
        same = (words[left] == words[left[first[inverse]]]).all(axis=1)
        kinds[left[same]] = num_kinds + inverse[same]
        firsts.append(left[first])
        num_kinds += len(first)
        left = left[~same]
    return np.concatenate(firsts) if firsts else np.empty(0, dtype=np.int64), kinds


def _words(rows: NDArray[np.int16]) -> NDArray[np.uint64]:
    """The rows, filled up with zeros, four numbers a word."""
    num_words = -(-rows.shape[1] // 4)
    if rows.shape[1] % 4:
        padded = np.zeros((len(rows), 4 * num_words), dtype=np.int16)
        padded[:, : rows.shape[1]] = rows
        rows = padded
    flat: NDArray[np.uint64] = np.frombuffer(np.ascontiguousarray(rows), dtype=np.uint64)
    return np.reshape(flat, (len(rows), num_words))


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A polynomial in an odd number, modulo 2^64."""
    factors: NDArray[np.uint64] = np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, dtype=np.uint64))
    return words @ factors
