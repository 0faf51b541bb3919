"""What ``psrl sft`` refuses before it loads anything, and the order in which it trains."""

from pathlib import Path

import numpy as np
import pytest

from psrl.data import ReplaySample
from psrl.errors import ConfigError, InputError
from psrl.sft.batches import epoch_batches
from psrl.sft.export import check_out
from psrl.sft.options import SFTOptions


def options(**values) -> SFTOptions:
    return SFTOptions(**{"files": (Path("a.jsonl"),), "model": "tiny-qwen2", "out": Path("out"), **values})


@pytest.mark.parametrize("bad", [
    {"epochs": 0}, {"batch": 0}, {"max_tokens": 0}, {"limit": 0}, {"warmup": -1}, {"seed": -1}, {"lr": 0.0},
    {"lr": float("inf")}, {"sharing": "both"}, {"dtype": "int8"}, {"mode": "turn"},
])  # fmt: skip
def test_bad_values_name_the_flag(bad):
    with pytest.raises(ConfigError, match="--" + next(iter(bad)).replace("_", "-")):
        options(**bad)


def test_the_output_folder(tmp_path):
    check_out(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    check_out(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").touch()
    for out, reason in ((tmp_path / "full", "not an empty folder"), (tmp_path / "a" / "b", "does not exist")):
        with pytest.raises(InputError, match=reason):
            check_out(out)


def sample(session: str, index: int) -> ReplaySample:
    ids = np.arange(3)
    return ReplaySample(f"f:{index}", ids, ids > 1, ids, np.ones(1), None, "u", session, index)


def order(batches: list[list[ReplaySample]]) -> tuple[tuple[str, int], ...]:
    return tuple((sample.session, sample.index) for batch in batches for sample in batch)


def test_an_epoch_has_every_sample_once_and_keeps_sessions_together():
    samples = [sample(session, index) for session in "abcdefgh" for index in range(3)]
    first, second = (epoch_batches(samples, 5, seed=1, epoch=epoch) for epoch in (0, 1))
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 4]
    for batches in (first, second):
        ordered = order(batches)
        assert sorted(ordered) == [(s.session, s.index) for s in samples]
        assert [session for session, _ in ordered][::3] == [session for session, _ in ordered][2::3]
        assert [index for _, index in ordered] == [0, 1, 2] * 8
    orders = {(seed, epoch): order(epoch_batches(samples, 5, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[1, 0] == order(first)
