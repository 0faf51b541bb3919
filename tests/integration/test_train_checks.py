"""What makes a job impossible ends ``psrl train`` in one line before Ray starts."""

import os
from unittest import mock

import pytest
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.integrations.verl.job import launch
from psrl.models.tiny_chat import make_tiny_chat


def test_weights_that_do_not_fit_are_found_before_ray_starts(tmp_path, monkeypatch):
    model = tmp_path / "model"
    make_tiny_chat(model, hidden=32)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        (tmp_path / "data" / f"{name}.parquet").touch()
    monkeypatch.setattr(launch, "_run", lambda config: pytest.fail("the job was started"))
    with mock.patch.dict(os.environ):  # the job sets variables in this process
        result = CliRunner().invoke(app, ["train", "--config-name", "cpu_quickstart", f"job_dir={tmp_path}"])
    assert result.exit_code == 2
    assert f"psrl: error: {weights}: not a whole safetensors file" in result.stderr.splitlines()[-1]
