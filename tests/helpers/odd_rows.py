"""Batches on which a search that starts from whole groups alone ends up slower than veRL's own order, now and then."""

from collections.abc import Iterator

import numpy as np

from psrl.data import ReplaySample


def odd_rows(num_batches: int, num_rows: int = 12) -> Iterator[list[ReplaySample]]:
    """Rows of 2 to 30 tokens, of one to four prompts, that branch at random."""
    for seed in range(num_batches):
        rng = np.random.default_rng(seed)
        num_prompts = int(rng.integers(1, 5))
        batch = []
        for index in range(num_rows):
            prompt, length = int(rng.integers(num_prompts)), int(rng.integers(2, 31))
            ids = np.concatenate([[prompt + 1], rng.integers(1, 3, length - 1)]).astype(np.int64)
            batch.append(
                ReplaySample(
                    where=f"f:{index + 1}",
                    input_ids_N=ids,
                    loss_mask_N=np.arange(length) == length - 1,
                    position_ids_N=np.arange(length),
                    advantages_M=np.ones(1),
                    old_log_probs_M=None,
                    uid=str(prompt),
                    session=str(index),
                    index=0,
                )
            )
        yield batch
