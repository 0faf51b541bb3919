"""Which samples an offline training's steps and ranks get, and its options."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from psrl.data import ReplaySample
from psrl.errors import ConfigError, InputError
from psrl.offline.export import check_out
from psrl.offline.options import Layout, OfflineOptions
from psrl.offline.schedule import batches, epoch_batches, num_steps
from psrl.placement.segments import segments_from_tokens
from psrl.placement.upstream import upstream_order
from tests.helpers.odd_rows import odd_rows


def samples(num_sessions: int, num_turns: int) -> list[ReplaySample]:
    """Step-wise sessions: turn t holds all earlier turns."""
    found = []
    for session in range(num_sessions):
        ids = np.arange(5 * num_turns) + 1000 * session
        for turn in range(num_turns):
            length = 5 * (turn + 1)
            mask = np.arange(length) >= length - 2
            found.append(
                ReplaySample(f"f:{len(found) + 1}", ids[:length], mask, np.arange(length), np.ones(2), None, "",
                             str(session), turn)
            )  # fmt: skip
    return found


def test_every_sample_once_an_epoch_and_whole_sessions_on_a_rank():
    rows = samples(4, 4)
    steps = [step for rows_of in batches(
        rows, batch=8, rows_per_step=8, epochs=2, seed=1, num_ranks=2) for step in rows_of.steps]  # fmt: skip
    assert [(step.step, step.epoch, step.num_samples) for step in steps] == [
        (1, 1, 8), (2, 1, 8), (3, 2, 8), (4, 2, 8),
    ]  # fmt: skip
    for epoch in (1, 2):
        seen = sorted(s.where for step in steps if step.epoch == epoch for rank in step.ranks for s in rank)
        assert seen == sorted(sample.where for sample in rows)
    for step in steps:
        for rank in step.ranks:
            assert len(rank) == 4 and len({sample.session for sample in rank}) == 1


def test_ranks_have_equally_many_rows_and_padding_trains_nothing():
    (rows_of,) = batches(samples(1, 3), batch=3, rows_per_step=3, epochs=1, seed=1, num_ranks=2)
    (step,) = rows_of.steps
    assert [len(rank) for rank in step.ranks] == [2, 2]
    assert step.num_samples == 3
    assert sorted(sample.num_targets for rank in step.ranks for sample in rank) == [0, 2, 2, 2]
    assert min(sample.num_tokens for rank in step.ranks for sample in rank) == 2


def test_a_resumed_training_gets_the_rows_it_would_have_had():
    def steps(first_step: int) -> list[tuple[int, list[str]]]:
        found = batches(samples(3, 4), batch=4, rows_per_step=2, epochs=3, seed=7, num_ranks=2, first_step=first_step)
        return [(s.step, [x.where for r in s.ranks for x in r]) for rows_of in found for s in rows_of.steps]

    whole = steps(1)
    assert [number for number, _ in whole] == list(range(1, 19))
    assert steps(9) == whole[8:]
    # Sessions are shuffled in every epoch.
    epochs = [[rows for _, rows in whole[start : start + 6]] for start in (0, 6, 12)]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


def test_training_ends_with_a_whole_batch():
    assert num_steps(10, 2, 4, epochs=2) == 10
    assert num_steps(10, 2, 4, epochs=2, limit=1) == 2
    assert num_steps(10, 2, 4, epochs=2, limit=5) == 5  # the third batch is half
    assert num_steps(10, 2, 4, epochs=2, limit=6) == 7
    found = batches(samples(1, 10), batch=4, rows_per_step=2, epochs=2, seed=1, num_ranks=1, last_step=6)
    assert [step.step for rows_of in found for step in rows_of.steps] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 8, "mini_batch": 3}, "--batch 8 must be a multiple of --mini-batch 3"),
        ({"lr": 0.0}, "--lr must be a finite number above 0, got 0.0"),
        ({"objective": "ppo"}, "--objective must be one of pg, sft, got 'ppo'"),
        ({"objective": "sft", "kl_coef": 0.1}, "--kl-coef is of the policy loss: not with --objective sft"),
        ({"save_every": 2}, "--save-every and --keep need --checkpoints"),
        ({"timeout": float("nan")}, "--timeout must be a finite number above 0, got nan"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"warmup": -1}, "--warmup must be at least 0, got -1"),
        ({"seed": -1}, "--seed must be in 0 .. 4294967295, got -1"),
        ({"lr": float("inf")}, "--lr must be a finite number above 0, got inf"),
        ({"sharing": "both"}, "--sharing must be one of on, off, got 'both'"),
        ({"dtype": "int8"}, "--dtype must be one of float32, float64, bfloat16, got 'int8'"),
        ({"mode": "turn"}, "--mode must be one of step, trajectory, got 'turn'"),
    ],
)
def test_options_out_of_range_name_the_flag(values, message):
    with pytest.raises(ConfigError) as error:
        OfflineOptions(files=(Path("f"),), model="tiny-qwen2", **values)
    assert str(error.value) == message


def test_layouts_that_do_not_divide():
    assert Layout(tp=2, pp=2).data_parallel_size(8) == 2
    with pytest.raises(ConfigError, match=r"6 processes do not divide by --tp 2 x --pp 2 x --cp 1 = 4"):
        Layout(tp=2, pp=2).data_parallel_size(6)
    with pytest.raises(ConfigError, match="--vpp 2 needs --pp above 1"):
        Layout(vpp=2)
    with pytest.raises(ConfigError, match="--ep 3 does not divide the 4 ranks of a stage"):
        Layout(ep=3).data_parallel_size(4)


def test_the_output_folder(tmp_path):
    check_out(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").touch()
    for out, reason in (
        (tmp_path / "full", "not an empty folder"),
        (tmp_path / "a" / "b", "does not exist"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(InputError, match=reason):
            check_out(out)


def one_token_of(session: str, index: int) -> ReplaySample:
    ids = np.arange(3)
    return ReplaySample(f"f:{index}", ids, ids > 1, ids, np.ones(1), None, "u", session, index)


def order(batches: list[list[ReplaySample]]) -> tuple[tuple[str, int], ...]:
    return tuple((sample.session, sample.index) for batch in batches for sample in batch)


def test_an_epoch_has_every_sample_once_and_keeps_sessions_together():
    rows = [one_token_of(session, index) for session in "abcdefgh" for index in range(3)]
    first, second = (epoch_batches(rows, 5, seed=1, epoch=epoch) for epoch in (0, 1))
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 4]
    for found in (first, second):
        ordered = order(found)
        assert sorted(ordered) == [(s.session, s.index) for s in rows]
        assert [session for session, _ in ordered][::3] == [session for session, _ in ordered][2::3]
        assert [index for _, index in ordered] == [0, 1, 2] * 8
    orders = {(seed, epoch): order(epoch_batches(rows, 5, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[1, 0] == order(first)


def test_no_step_is_slower_than_with_the_order_of_verl():
    for rows in odd_rows(30):
        (rows_of,) = batches(rows, batch=12, rows_per_step=12, epochs=1, seed=1, num_ranks=4)
        busiest = max(workload(rank) for rank in rows_of.steps[0].ranks)
        upstream = upstream_order(np.array([row.num_tokens for row in rows]), 4).reshape(4, 3)
        assert busiest <= (1 + 1e-9) * max(workload([rows[row] for row in rank]) for rank in upstream)


def workload(rows: Sequence[ReplaySample]) -> float:
    return segments_from_tokens([row.input_ids_N for row in rows]).workload(np.arange(len(rows)))
