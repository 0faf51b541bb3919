"""What makes a job impossible ends ``psrl train`` in one line before Ray starts."""

import os
import subprocess
import sys
from pathlib import Path

from psrl.models.tiny_chat import make_tiny_chat

REPOSITORY = Path(__file__).resolve().parents[2]


def test_weights_that_do_not_fit_are_found_before_ray_starts(tmp_path):
    model = tmp_path / "model"
    make_tiny_chat(model, hidden=32)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        (tmp_path / "data" / f"{name}.parquet").touch()
    kept = {k: v for k, v in os.environ.items() if k not in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-m", "psrl.cli.main", "train", "--config-name", "cpu_quickstart", f"job_dir={tmp_path}"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert f"psrl: error: {weights}: not a whole safetensors file" in done.stderr.splitlines()[-1]
    assert "ray init kwargs" not in done.stdout
