"""``benchmarks/gpu_session.py`` at toy size, and what its report makes of results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ["doctor", "tests", "attention", "step"]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def session(out: Path, *args: object) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, "benchmarks/gpu_session.py", "--cpu", "--out", str(out), *map(str, args)]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return outcome, json.loads((out / "session.json").read_text())


@pytest.mark.slow
def test_a_whole_session(tmp_path):
    outcome, record = session(tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert list(record["parts"]) == PARTS and record["failed"] == []
    results = {name: part["result"] for name, part in record["parts"].items()}
    assert {finding["state"] for finding in results["doctor"]} <= {"ok", "absent"}
    assert results["tests"]["tests"] == results["tests"]["skipped"] > 20
    assert results["attention"]["workloads"]["grpo"]["backends"]["sdpa"]["step_ms"] > 0
    rows = results["attention"]["workloads"]["responses"]["backends"]
    # A path of 40 tokens, with one head of 16 floats in K and V; and both as ``triton`` in its interpreter.
    assert rows["gathered"]["saved_bytes"] - rows["in_place"]["saved_bytes"] == 40 * 2 * 16 * 4
    assert results["step"]["model"] == "tiny" and results["step"]["unshared_attention"] == "sdpa"
    assert results["step"]["runs"]["toy"]["unique_tokens"] == 220  # 40 + 4 x 30 + 3 x 20
    assert {target["name"].split()[0] for target in record["targets"]} == {"update", "bfloat16"}
    assert all(values["ratio"] <= 1.1 for values in results["step"]["bfloat16_errors"]["toy"].values())
    report = (tmp_path / "report.md").read_text()
    assert "| responses | " in report.split("speed-up of in place over gathered")[1]
    assert "![attention" in report and "| tests |" in report and "no figures of a GPU" in report
    for plot in ("attention.png", "step.png"):
        assert (tmp_path / plot).stat().st_size > 10_000


@pytest.mark.slow
def test_a_failing_part_does_not_end_the_session(tmp_path):
    (tmp_path / "step.json").write_text("{}")  # of an earlier session
    outcome, record = session(tmp_path, tmp_path / "gone.jsonl", "--parts", "step", "tests")
    assert outcome.returncode == 1
    assert outcome.stderr.splitlines()[-1] == "failed: step"
    assert record["parts"]["step"]["failure"] == "exit code 2" and record["parts"]["step"]["result"] is None
    assert record["parts"]["tests"]["failure"] is None
    assert "gone.jsonl: no such file" in (tmp_path / "step.err").read_text()
    assert "**failed**: exit code 2; see step.log and step.err" in (tmp_path / "report.md").read_text()


def test_a_part_that_hangs_or_leaves_nothing_has_failed(tmp_path):
    from gpu_session import Part, read_json, read_tests

    hangs = Part("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], read_json("hangs.json"))
    hangs.run(tmp_path, 0.1)
    assert hangs.outcome["failure"] == "took more than 0.1 s"
    silent = Part("silent", [sys.executable, "-c", ""], read_json("silent.json"))
    silent.run(tmp_path, 60)
    assert silent.outcome["failure"].startswith("its results cannot be read")
    suite = '<testsuites><testsuite tests="4" failures="0" errors="0" skipped="{}" /></testsuites>'
    for skipped, failure in ((4, "no test ran"), (1, None)):
        (tmp_path / "tests.xml").write_text(suite.format(skipped))
        tests = Part("tests", [sys.executable, "-c", ""], read_tests(needs_gpu=True))
        tests.run(tmp_path, 60)
        assert tests.outcome["failure"] == failure


def test_targets():
    from gpu_report import targets_of

    def rows(forward: float, step: float) -> dict:
        return {"backends": {"triton": {"forward_rate": forward, "step_rate": step}, "flash": {"forward_rate": 0.1}}}

    parts = {
        "attention": {"result": {"device": "a GPU", "workloads": {"grpo": rows(0.61, 0.59), "tree": {"backends": {}}}}},
        "step": {
            "result": {
                "runs": {"alfworld": {"update": {"speedup": 6.4, "ideal_speedup": 8.0}}},
                "bfloat16_errors": {"alfworld": {"gradients": {"ratio": 1.11}}},
            }
        },
        "doctor": {"result": None},
    }
    assert [(target["value"], target["is_met"]) for target in targets_of(parts)] == [
        (0.61, True), (0.59, False), (None, False), (None, False), (0.8, True), (1.11, False),
    ]  # fmt: skip
    parts["attention"]["result"]["device"] = "cpu"
    assert len(targets_of(parts)) == 2


def test_errors_of_bfloat16_are_relative_to_float32(tmp_path):
    from step import _errors

    values = {"exact": [3.0, 4.0], "shared": [3.0, 4.5], "unshared": [3.0, 3.0]}
    for name, numbers in values.items():
        (tmp_path / name).mkdir()
        first, second = (torch.tensor([number]) for number in numbers)
        save_file({"log_probs.0": first, "log_probs.1": second}, tmp_path / name / "samples.safetensors")
    found = _errors({name: tmp_path / name for name in values}, "log_probs")
    assert found == pytest.approx({"shared": 0.1, "unshared": 0.2, "ratio": 0.5})
