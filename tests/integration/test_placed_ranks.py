"""An epoch over processes that get their rows by placement, as veRL's dispatcher hands them out."""

import numpy as np
import pytest
from transfer_queue import KVBatchMeta

from psrl.placement.cells import Cells, RowKey
from psrl.placement.orchestrator import evaluate, place_rows
from psrl.placement.segments import segments_from_tokens
from tests.helpers import Row, make_checkpoint
from tests.helpers.forests import step_rows
from tests.helpers.parallel import Job, Layout, reference, run_job
from tests.helpers.parallel_checks import check_job
from tests.helpers.ranks import RankPool

MINI_BATCH_ROWS, BUDGET = 8, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", False, layers=2)


def placed_chunks(num_ranks):
    """Fifteen rows and one of padding by key, and every rank's keys: three trajectories in two mini-batches."""
    rows = [*step_rows(num_groups=3, num_steps=5, seed=4), Row([1] * 16, [0] * 16, uid="pad")]
    keys = [f"{row.uid.replace('_', '')}_0_{index % 5}" for index, row in enumerate(rows[:-1])] + ["pad_0_0"]
    is_padding = np.arange(len(rows)) == 15
    batch = KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id="train")
    cells = Cells.of(len(rows), num_ranks, MINI_BATCH_ROWS)
    segments = segments_from_tokens([np.asarray(row.input_ids) for row in rows])
    parsed = [RowKey.parse(key) for key in keys]
    shuffled = np.random.default_rng(0).permutation(len(rows))
    placed = place_rows(parsed, is_padding, segments, cells, grouping="uid", split_groups=True, upstream_S=shuffled)
    before = evaluate(parsed, is_padding, segments, cells, shuffled, "uid")
    assert placed.critical_path < before.critical_path
    batch.reorder(placed.order_S.tolist())
    return dict(zip(keys, rows, strict=True)), [chunk.keys for chunk in batch.chunk(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_row_is_trained_once_per_epoch(checkpoint, tmp_path, num_ranks):
    rows, chunks = placed_chunks(num_ranks)
    size = MINI_BATCH_ROWS // num_ranks
    pool = RankPool(num_ranks, tmp_path)
    trained: list[str] = []
    try:
        for start in range(0, len(rows) // num_ranks, size):
            shares = [[rows[key] for key in chunk[start : start + size]] for chunk in chunks]
            job = Job(checkpoint, shares, budgets=(BUDGET,), adam=False)
            results = pool.run(run_job, job, Layout())
            # Gradients of the sum, log-probs of every row on its rank, and the loss: those of one process.
            check_job(job, results, reference(job, f"placed {num_ranks} {start}"), 1e-9)
            for result in results:
                stats = result.reports[BUDGET].stats
                own = shares[result.dp_rank]
                assert stats.num_samples == size
                assert stats.num_tokens == sum(len(row.input_ids) for row in own)
                assert stats.unique_tokens == num_distinct_prefixes(own)
                trained += chunks[result.dp_rank][start : start + size]
    finally:
        pool.close()
    assert sorted(trained) == sorted(rows)


def num_distinct_prefixes(rows):
    return len({tuple(row.input_ids[: end + 1]) for row in rows for end in range(len(row.input_ids))})
