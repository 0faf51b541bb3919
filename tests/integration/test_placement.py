"""Placement of recorded agent traces: balanced, and better than veRL's own."""

import numpy as np
import pytest
import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from psrl.data.load import load_samples
from psrl.data.tokenizer import load_tokenizer
from psrl.integrations.verl.orchestrator import Cells, RowKey, evaluate, place_rows
from psrl.integrations.verl.segments import segments_from_lengths, segments_from_tokens

TRACES = ("alfworld_scripted", "alfworld_tree_scripted", "textworld_scripted", "textworld_tree_scripted")
ROWS_PER_CELL = 16


def upstream_order(seqlens: list[int], num_ranks: int) -> np.ndarray:
    partitions = get_seqlen_balanced_partitions(
        calculate_workload(torch.tensor(seqlens)), k_partitions=num_ranks, equal_size=True
    )
    return np.asarray([row for partition in partitions for row in partition])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", TRACES)
def test_step_samples_of_traces(shared_dir, name, num_ranks):
    path = shared_dir / "traces" / f"{name}.jsonl.gz"
    samples = load_samples([path], tokenizer=lambda: load_tokenizer("bytes"), mode="step").samples
    missing = -len(samples) % (ROWS_PER_CELL * num_ranks)
    keys = [RowKey(s.uid, s.session, s.index) for s in samples] + [RowKey("pad", str(i), 0) for i in range(missing)]
    padding = np.arange(len(keys)) >= len(samples)
    ids = [s.input_ids_N for s in samples] + [np.ones(128, dtype=np.int64)] * missing
    prompts = [int(np.flatnonzero(s.loss_mask_N)[0]) for s in samples] + [127] * missing
    tags = [{"prompt_len": prompt, "seq_len": len(row)} for prompt, row in zip(prompts, ids, strict=True)]

    exact = segments_from_tokens(ids)
    cells = Cells.of(len(keys), num_ranks, ROWS_PER_CELL * num_ranks)
    before = evaluate(keys, padding, exact, cells, upstream_order([len(row) for row in ids], num_ranks), "uid")
    for segments in (exact, segments_from_lengths(keys, tags, padding)):
        order = place_rows(keys, padding, segments, cells, grouping="uid", split_groups=True).order_S
        placed = evaluate(keys, padding, exact, cells, order, "uid")
        assert placed.imbalance <= 1.1
        assert placed.imbalance < before.imbalance
        assert placed.critical_path < 0.85 * before.critical_path
        assert placed.num_split_groups <= before.num_split_groups
