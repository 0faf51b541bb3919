"""How veRL itself cuts a rank's rows into micro-batches, for the unshared side of a simulation.

``rearrange_micro_batches`` of verl/utils/seqlen_balancing.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psrl.errors import ConfigError
from psrl.placement.upstream import balanced_partition, row_workload
from psrl.types import IntArray


def upstream_micro_batches(ranks: Sequence[IntArray], max_tokens: int, multiple: int = 1) -> list[list[IntArray]]:
    """veRL's micro-batches on every rank of a data-parallel group, as indices into the rank's rows.

    All ranks get the same number, which grows until every micro-batch fits.

    Args:
        ranks: sequence lengths of every rank's rows.
        max_tokens: raised to the longest row, which veRL does not split.
        multiple: of micro-batches (interleaved schedules).

    Raises:
        ConfigError: a rank has fewer rows than micro-batches are needed.
    """
    limit = max(max_tokens, max(int(seqlens.max()) for seqlens in ranks))
    number = max(min(len(seqlens), -(-int(seqlens.sum()) // limit)) for seqlens in ranks)
    number = -(-number // multiple) * multiple
    while True:
        if number > min(map(len, ranks)):
            raise ConfigError(
                f"veRL cannot cut {min(map(len, ranks))} rows of a rank into {number} micro-batches of at most {limit} "
                "tokens: give every rank more rows, or raise --max-tokens"
            )
        cuts = [balanced_partition(row_workload(seqlens).tolist(), number, equal_size=False) for seqlens in ranks]
        if all(int(lens[part].sum()) <= limit for lens, cut in zip(ranks, cuts, strict=True) for part in cut):
            break
        number += multiple
    return [_ordered(cut, row_workload(seqlens)) for cut, seqlens in zip(cuts, ranks, strict=True)]


def _ordered(parts: list[list[int]], workload_S: IntArray) -> list[IntArray]:
    """Small ones at both ends, where the pipeline fills and drains."""
    parts = sorted(parts, key=lambda part: (int(workload_S[part].sum()), part[0] if part else 0), reverse=True)
    return [np.asarray(part, dtype=np.int64) for part in parts[::2][::-1] + parts[1::2]]
