"""``psrl bench`` on conversations of a few words."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psrl.cli.main import app

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow


def conversation(trial: int) -> dict:
    messages = [{"role": "user", "content": "Find the key. " * 8}]
    for step in range(4):
        messages += [
            {"role": "assistant", "content": f"I look {trial}. Action: open {step}"},
            {"role": "user", "content": "There is nothing in here. " * 4},
        ]
    return {"task": "key", "trial": trial, "messages": messages}


def test_record_tables_plots_and_page(tmp_path: Path):
    trace, out, page = tmp_path / "talk.jsonl", tmp_path / "out", tmp_path / "page.md"
    trace.write_text("\n".join(json.dumps(conversation(trial)) for trial in range(2)))
    args = (
        "bench", trace, "--out", out, "--page", page, "--strategy", "linear", "--strategy", "step", "--repeat", 2,
        "--hidden", 32, "--layers", 1, "--max-tokens", 128, "--length", 1, "--ranks", 2,
    )  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    record = json.loads((out / "bench.json").read_text())
    assert [(c["trace"], c["strategy"], c["samples"]) for c in record["cases"]] == [
        ("talk", "linear", 2),
        ("talk", "step", 8),
    ]
    measured = [record["ablations"], *record["throughput"], *record["lengths"]]
    assert [list(case["systems"]) for case in record["throughput"]] == [
        ["unshared", "tree_packing", "paged", "radix", "psrl", "psrl_half"]
    ] * 2
    for case in measured:
        for name, values in case["systems"].items():
            assert values["gradient_error"] <= 3e-5, name
            assert values["kv_bytes_measured"] == values["kv_bytes_predicted"], name
            assert len(values["seconds"]["step"]) == 2 and min(values["seconds"]["step"]) > 0
            low, high = values["step_ratio_spread"]
            assert low <= values["step_ratio"] <= high
    for case in record["throughput"]:
        cached = {name: values["kv_bytes_measured"] for name, values in case["systems"].items()}
        assert 0 < cached["psrl_half"] <= min(cached["paged"], cached["radix"]) // 2
    curves = record["bytes"][0]["systems"]
    assert curves["psrl"]["kv_peak"] <= curves["radix"]["kv_peak"] <= curves["paged"]["kv_peak"]
    assert record["ranks"][0]["ranks"] == 2 and record["ranks"][0]["speedup"] > 1
    tables = {path.stem for path in out.glob("*.csv")}
    assert tables == {
        "cases",
        "throughput",
        "cache",
        "phases",
        "bytes",
        "kv_peak",
        "evenness",
        "ablations",
        "latency",
        "lengths",
        "ranks",
    }
    text = page.read_text()
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.split("(")[1].rstrip(")")).stat().st_size > 10_000
    assert text.count("![") == 4 and "| talk step |" in text
