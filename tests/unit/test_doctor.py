"""``psrl doctor``: what it says of this installation, and of broken ones."""

import json

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.doctor import State, devices
from psrl.doctor.packages import find_package


@pytest.fixture(scope="module")
def findings() -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert result.exit_code == 0, [f for f in found if f["state"] == "wrong"]
    return {f"{f['section']}/{f['name']}": f for f in found}


def test_says_what_runs_here(findings):
    assert findings["wiring/veRL's engine"]["state"] == "ok"
    assert "PSRLEngineWithLMHead" in findings["wiring/veRL's engine"]["detail"]
    assert int(findings["wiring/hooks"]["detail"].split()[0]) >= 3
    assert findings["wiring/patches"]["state"] == "ok"
    assert findings["rollout/hf"]["state"] == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_says_what_needs_a_gpu(findings):
    assert findings["attention backends/sdpa (auto)"]["state"] == "ok"
    assert findings["attention backends/sdpa (auto)"]["detail"].endswith("; path gathered")
    for backend in ("triton", "flash", "flex"):
        finding = findings[f"attention backends/{backend}"]
        assert (finding["state"], finding["fix"]) == ("absent", "use sdpa"), backend
    assert findings["devices/cuda"]["state"] == "absent"


def test_every_finding_that_is_not_ok_says_what_to_do(findings):
    assert {name for name, f in findings.items() if f["state"] != "ok" and not f["fix"]} == set()


def test_packages():
    assert find_package(Requirement("no-such-package>=1"), None).state is State.WRONG
    absent = find_package(Requirement("no-such-package>=1"), "gpu")
    assert (absent.state, absent.fix) == (State.ABSENT, "pip install 'psrl[gpu]'")
    old = find_package(Requirement("torch>=99"), "gpu")
    assert (old.state, old.fix) == (State.WRONG, "pip install 'torch>=99'")
    assert find_package(Requirement(f"torch=={torch.__version__.partition('+')[0]}"), None).state is State.OK


def test_a_backend_that_computes_wrongly_is_found(monkeypatch):
    right = devices.attend_layout

    def wrong(q, k, v, layout, *, backend):
        return right(q, k, v * (2 if backend == "sdpa" else 1), layout, backend=backend)

    monkeypatch.setattr(devices, "attend_layout", wrong)
    assert devices.backend_error("sdpa", "cpu", torch.float32) == pytest.approx(1.0, rel=1e-3)
    (sdpa,) = [f for f in devices.check_backends() if f.name.startswith("sdpa")]
    assert sdpa.state is State.WRONG


def test_exit_code_and_table_where_something_is_wrong(monkeypatch):
    monkeypatch.setitem(devices._TOLERANCE, torch.float32, 0.0)
    monkeypatch.setattr("psrl.doctor.examine", lambda: list(devices.check_backends()))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "do not use it; report it with this output" in result.output
