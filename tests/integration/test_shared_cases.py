"""Conformance cases and slices of recorded traces against independent samples."""

import json

import pytest
import torch

from psrl.config import PSRLConfig
from psrl.data.load import load_samples
from psrl.data.tokenizer import load_tokenizer
from tests.helpers import Row, hf_truth, make_checkpoint, make_worker, ppo_loss_fn, relative_errors
from tests.helpers.engines import run_update

VOCAB = 320
BUDGETS = (1, 2, 3, 5, 1000)
TRACES = {
    "alfworld_scripted.jsonl.gz": "step",
    "alfworld_tree_scripted.jsonl.gz": "step",
    "textworld_scripted.jsonl.gz": "trajectory",
    "textworld_tree_scripted.jsonl.gz": "trajectory",
    "webshop_react.jsonl.gz": "step",
    "miniswe_gemini3pro.jsonl.gz": "trajectory",
    "sweagent_demos.jsonl.gz": "step",
}


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """Both take the same plans; ``test_exactness.py`` has Qwen3 on forests of its own."""
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, vocab=VOCAB)
    return folder, make_worker(folder, psrl=PSRLConfig())


def check(model, rows, loss_fn, budgets):
    folder, worker = model
    truth = hf_truth(folder, rows, loss_fn)
    first = None
    for budget in budgets:
        outcome = run_update(worker, rows, loss_fn, max_tokens=budget)
        assert max(relative_errors(outcome.grads, truth.grads).values()) <= 2e-6
        for got, want, row in zip(outcome.model_output["log_probs"], truth.log_probs, rows, strict=True):
            want = want[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]
            assert torch.allclose(got, want, rtol=2e-6, atol=2e-6)
        assert outcome.loss == pytest.approx(truth.loss, rel=2e-6, abs=2e-6)
        first = first or outcome
        assert max(relative_errors(outcome.grads, first.grads).values()) <= 1e-9
    return first


def test_conformance_cases(model, shared_dir):
    for case in json.loads((shared_dir / "conformance" / "cases.json").read_text()):
        rows = []
        for sample in case["samples"]:
            num_targets = sum(sample["loss_mask"])
            rows.append(
                Row(
                    sample["input_ids"],
                    sample["loss_mask"],
                    advantages=[sample.get("advantage", 1.0)] * num_targets,
                    old_log_probs=sample.get("old_log_probs", []),
                    position_ids=sample.get("position_ids"),
                )
            )
        gspo = case.get("loss") == "gspo"
        loss_fn = ppo_loss_fn("gspo", "seq-mean-token-mean") if gspo else ppo_loss_fn()
        outcome = check(model, rows, loss_fn, (case.get("budget", 1000), *BUDGETS))
        expect = case["expect"]
        if "unique_tokens" in expect:
            assert outcome.report.stats.unique_tokens == expect["unique_tokens"], case["name"]
        if "targets" in expect:
            assert [len(x) for x in outcome.model_output["log_probs"]] == expect["targets"], case["name"]


def shorten(file, target):
    """The first rows of a trace, their messages cut short, so that every form stays and the test is quick."""
    import gzip

    with gzip.open(file, "rt") as source, open(target, "w") as out:
        for _, line in zip(range(4), source, strict=False):
            row = json.loads(line)
            row["messages"] = [{"role": m["role"], "content": m["content"][:18]} for m in row["messages"][:9]]
            out.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("trace", TRACES)
def test_slices_of_recorded_traces(model, shared_dir, tmp_path, trace):
    shorten(shared_dir / "traces" / trace, tmp_path / "slice.jsonl")
    loaded = load_samples([tmp_path / "slice.jsonl"], tokenizer=lambda: load_tokenizer(None), mode=TRACES[trace])
    rows = [Row(s.input_ids_N.tolist(), s.loss_mask_N.astype(int).tolist(), uid=s.uid) for s in loaded.samples]
    for index, row in enumerate(rows):
        row.advantages = [(-1.0) ** index * (0.5 + 0.1 * index)] * sum(row.loss_mask)
    outcome = check(model, rows, ppo_loss_fn(), (40, 4000))
    assert outcome.report.stats.prefix_match_rate > 0
