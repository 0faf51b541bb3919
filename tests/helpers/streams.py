"""Streams and radix trees of the analysis, from plain lists."""

import numpy as np

from psrl.analyze.radix import RadixTree
from psrl.analyze.streams import Stream, keys_of


def stream(ids, mask=None, *, ends=None, begins=None, uid="", session="", index=0, positions=None) -> Stream:
    ids = np.asarray(ids, dtype=np.int64)
    positions = np.arange(len(ids)) if positions is None else np.asarray(positions, dtype=np.int64)
    mask = np.zeros(len(ids), dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_)
    ends = tuple(ends or (len(ids),))
    return Stream("f:1", keys_of(ids, positions), mask, ends, tuple(begins or (0,) * len(ends)), uid, session, index)


def tree_of(*streams: Stream) -> RadixTree:
    tree = RadixTree()
    for item in streams:
        tree.add(item)
    return tree
