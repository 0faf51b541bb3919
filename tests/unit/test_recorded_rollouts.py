"""Rollouts on disk: what is read is what was written, and a folder that does not fit the job is refused."""

from pathlib import Path

import pytest
import torch

from psrl.errors import ConfigError, InputError
from psrl.integrations.verl.job.config import OrchestratorConfig
from psrl.integrations.verl.trainer.recorded_rollouts import RolloutStore, StepRows, read_step, write_step

SETTINGS = {"data.train_batch_size": 2, "actor_rollout_ref.rollout.n": 1}


def rows() -> StepRows:
    """Two rows: of different lengths, of two dimensions, a number, an empty tensor, texts with a line separator."""
    return StepRows(
        keys=["b_0_0", "a_0_0"],
        tags=[{"status": "success", "seq_len": 3}, {"status": "success", "seq_len": 1, "min_global_steps": None}],
        fields=[
            {
                "input_ids": torch.tensor([5, 6, 7]),
                "position_ids": torch.tensor([[0, 1, 2], [0, 0, 1]]),
                "rm_scores": torch.tensor([0.0, 0.1, 1e-30]),
                "index": torch.tensor(4),
                "extra_fields": {"state": "one\u2028line\nmore", "value": 0.1},
            },
            {
                "input_ids": torch.tensor([9]),
                "position_ids": torch.tensor([[0], [3]]),
                "rm_scores": torch.tensor([]),
                "index": torch.tensor(-1),
                "extra_fields": {},
            },
        ],
    )


def test_what_is_read_is_what_was_written(tmp_path: Path):
    write_step(tmp_path, 3, SETTINGS, rows())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003"]
    read, wanted = read_step(tmp_path, 3, SETTINGS), rows()
    assert read.keys == ["b_0_0", "a_0_0"] and read.tags == wanted.tags
    for row, other in zip(read.fields, wanted.fields, strict=True):
        assert row.keys() == other.keys()
        assert row["extra_fields"] == other["extra_fields"]
        for name in ("input_ids", "position_ids", "rm_scores", "index"):
            assert row[name].dtype == other[name].dtype and torch.equal(row[name], other[name])


def test_a_step_that_is_missing(tmp_path: Path):
    with pytest.raises(InputError, match=r"step 1 was not recorded \(it has no steps\)"):
        read_step(tmp_path, 1, SETTINGS)
    for step in (1, 2):
        write_step(tmp_path, step, SETTINGS, rows())
    with pytest.raises(InputError, match=r"step 3 was not recorded \(it has 2 steps, 1 to 2\)"):
        RolloutStore(SETTINGS, replay=tmp_path).begin_step(3)


def test_other_settings(tmp_path: Path):
    write_step(tmp_path, 1, SETTINGS, rows())
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.rollout.n=4, but .*step_000001 was recorded with 1"):
        read_step(tmp_path, 1, {**SETTINGS, "actor_rollout_ref.rollout.n": 4})


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tensors.safetensors", b"\0" * 20),
        ("rows.jsonl", b'{"key": "b_0_0"'),
        ("rows.jsonl", b""),
        ("step.json", b"{}"),
    ],
)
def test_a_broken_step(tmp_path: Path, file: str, content: bytes):
    write_step(tmp_path, 1, SETTINGS, rows())
    (tmp_path / "step_000001" / file).write_bytes(content)
    with pytest.raises(InputError, match="not a whole recorded step"):
        read_step(tmp_path, 1, SETTINGS)


@pytest.mark.parametrize("value", [object(), float("nan"), {1: "number as a key"}])
def test_a_value_that_json_does_not_keep(tmp_path: Path, value: object):
    broken = rows()
    broken.fields[1]["extra_fields"] = {"value": value}
    with pytest.raises(InputError, match="extra_fields of row a_0_0"):
        write_step(tmp_path, 1, SETTINGS, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_field_that_is_a_tensor_in_some_rows_only(tmp_path: Path):
    broken = rows()
    broken.fields[1]["input_ids"] = None
    with pytest.raises(InputError, match="input_ids is a tensor in some rows only"):
        write_step(tmp_path, 1, SETTINGS, broken)


def test_a_new_job_does_not_write_over_another_ones_steps(tmp_path: Path):
    write_step(tmp_path, 1, SETTINGS, rows())
    with pytest.raises(InputError, match="holds a step 1 already: name another folder"):
        RolloutStore(SETTINGS, record=tmp_path).begin_step(1)


def test_a_resumed_job_does(tmp_path: Path):
    for step in (1, 2):
        write_step(tmp_path, step, SETTINGS, rows())
    resumed = RolloutStore(SETTINGS, record=tmp_path)
    resumed.begin_step(2)
    write_step(tmp_path, 2, SETTINGS, StepRows(["c_0_0"], [{}], [{"input_ids": torch.tensor([1])}]))
    assert read_step(tmp_path, 2, SETTINGS).keys == ["c_0_0"]


def test_without_a_folder_nothing_is_attached():
    class Buffer:
        def sample(self) -> None: ...

    buffer = Buffer()
    RolloutStore.of(OrchestratorConfig(), SETTINGS).attach(buffer)
    assert "sample" not in vars(buffer)


def test_options():
    with pytest.raises(ConfigError, match=r"psrl.record_rollouts and psrl.replay_rollouts exclude each other"):
        OrchestratorConfig(record_rollouts="a", replay_rollouts="b")
    with pytest.raises(ConfigError, match=r"psrl.replay_rollouts must be a folder or null, got ''"):
        OrchestratorConfig(replay_rollouts="")
    with pytest.raises(ConfigError, match=r"psrl.poll_seconds must be a number above 0, got 0"):
        OrchestratorConfig(poll_seconds=0)
