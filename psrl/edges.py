"""Edges: the (source token, label) pairs that samples want, each once.

Shape legend: E edges, M targets, N tokens of all samples, S samples.
"""

from __future__ import annotations

import numpy as np

from psrl.errors import InputError
from psrl.tree import PrefixTree
from psrl.types import Edges, SampleBatch


def collect_edges(batch: SampleBatch, tree: PrefixTree) -> Edges:
    """Deduplicate the targets of all samples into edges, ordered by (source, temperature, label).

    Raises:
        InputError: the first token of a sample is a target.
    """
    first_tokens = batch.cu_seqlens[:-1]
    if batch.target_mask_N[first_tokens].any():
        sample = int(np.flatnonzero(batch.target_mask_N[first_tokens])[0])
        raise InputError(f"sample {sample}: its first token is a target, but nothing predicts it")
    targets = np.flatnonzero(batch.target_mask_N)
    counts_S = np.add.reduceat(np.append(batch.target_mask_N, False).astype(np.int64), first_tokens)
    sample_M = np.repeat(np.arange(batch.num_samples), counts_S)
    temperatures, temperature_S = np.unique(batch.temperatures_S, return_inverse=True)

    source_M, label_M = tree.index_N[targets - 1], batch.token_ids_N[targets]
    num_labels = int(label_M.max()) + 1 if len(targets) else 1
    keys_M = (source_M * len(temperatures) + temperature_S[sample_M]) * num_labels + label_M
    keys_E, edges_M = np.unique(keys_M, return_inverse=True)
    return Edges(
        source_E=keys_E // num_labels // max(1, len(temperatures)),
        label_E=keys_E % num_labels,
        temperature_E=temperatures[keys_E // num_labels % max(1, len(temperatures))],
        target_edges_M=np.ravel(edges_M).astype(np.int64),
        target_positions_M=targets - 1,
        cu_targets=np.concatenate([[0], np.cumsum(counts_S)]).astype(np.int64),
    )
