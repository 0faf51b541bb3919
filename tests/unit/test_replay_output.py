"""Dumps and JSON files appear whole or not at all."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from psrl.errors import InputError
from psrl.replay.output import check_targets, staged_json, write_dump, write_json

SAMPLES = {"log_probs.0": torch.tensor([-1.0, -2.0]), "log_probs.1": torch.empty(0)}
GRADS = {"w": torch.ones(2, 3)}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_dump(tmp_path: Path):
    folder = tmp_path / "D"
    check_targets(folder, None)
    write_dump(folder, SAMPLES, GRADS, {"samples": 2})
    assert names(folder) == ["grads.safetensors", "samples.safetensors", "summary.json"]
    got = safetensors.torch.load_file(folder / "samples.safetensors")
    assert got["log_probs.0"].tolist() == [-1.0, -2.0]
    assert got["log_probs.1"].shape == (0,)
    assert json.loads((folder / "summary.json").read_text()) == {"samples": 2}
    assert names(tmp_path) == ["D"]


def test_an_earlier_dump_is_replaced(tmp_path: Path):
    folder = tmp_path / "D"
    write_dump(folder, SAMPLES, GRADS, {"psrl_version": "1", "run": 1})
    check_targets(folder, None)
    write_dump(folder, {}, GRADS, {"psrl_version": "1", "run": 2})
    assert json.loads((folder / "summary.json").read_text()) == {"psrl_version": "1", "run": 2}
    assert safetensors.torch.load_file(folder / "samples.safetensors") == {}
    assert names(tmp_path) == ["D"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_dump_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type):
    folder = tmp_path / "D"
    write_dump(folder, SAMPLES, GRADS, {"psrl_version": "1", "run": 1})
    save_file = safetensors.torch.save_file

    def save_one(tensors, path):
        if Path(path).name == "grads.safetensors":
            raise stop
        save_file(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", save_one)
    with pytest.raises(stop):
        write_dump(folder, SAMPLES, GRADS, {"psrl_version": "1", "run": 2})
    assert json.loads((folder / "summary.json").read_text()) == {"psrl_version": "1", "run": 1}
    assert names(tmp_path) == ["D"]
    with pytest.raises(stop):
        write_dump(tmp_path / "E", SAMPLES, GRADS, {"psrl_version": "1", "run": 2})
    assert names(tmp_path) == ["D"]


def test_a_folder_that_turned_into_something_else_is_kept(tmp_path: Path):
    folder = tmp_path / "D"
    folder.mkdir()
    check_targets(folder, None)
    (folder / "notes").touch()
    with pytest.raises(InputError, match="no part of a dump"):
        write_dump(folder, SAMPLES, GRADS, {})
    assert names(tmp_path) == ["D"]
    assert names(folder) == ["notes"]


def test_json(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text("old")
    write_json(path, {"loss": float("nan"), "list": [1.5, float("inf")], "name": None})
    assert json.loads(path.read_text()) == {"loss": None, "list": [1.5, None], "name": None}
    assert names(tmp_path) == ["r.json"]


def test_json_that_fails_leaves_the_earlier_one(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert path.read_text() == "old"
    assert names(tmp_path) == ["r.json"]


def test_write_error_is_reported(tmp_path: Path):
    with pytest.raises(InputError, match=r"--json .*: cannot write: No such file or directory"):
        write_json(tmp_path / "no" / "r.json", {})


@pytest.mark.parametrize("summary", [None, "{}", "[]", "mine"])
def test_files_of_these_names_that_are_no_dump_are_kept(tmp_path: Path, summary: str | None):
    (tmp_path / "samples.safetensors").touch()
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(InputError, match=r"has no summary\.json of an earlier dump"):
        check_targets(tmp_path, None)


def test_a_folder_inside_is_no_dump(tmp_path: Path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(InputError, match="no regular file"):
        check_targets(tmp_path, None)


def test_json_does_not_replace_an_input_or_part_of_the_dump(tmp_path: Path):
    source, dump = tmp_path / "s.jsonl", tmp_path / "D"
    source.touch()
    dump.mkdir()
    with pytest.raises(InputError, match="is an input file"):
        check_targets(None, tmp_path / "D" / ".." / "s.jsonl", [source])
    for target in (dump / "r.json", tmp_path / "D2"):
        with pytest.raises(InputError, match="the --dump folder or inside it"):
            check_targets(dump if target != tmp_path / "D2" else target, target)


def test_json_that_cannot_be_written_leaves_no_dump(tmp_path: Path):
    with pytest.raises(InputError, match="--json /dev/full: cannot write"), staged_json(Path("/dev/full"), {}):
        write_dump(tmp_path / "D", SAMPLES, GRADS, {})
    with pytest.raises(InputError), staged_json(tmp_path / "r.json", {}):
        write_dump(tmp_path / "no" / "D", SAMPLES, GRADS, {})
    assert names(tmp_path) == []
