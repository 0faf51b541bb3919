"""Supervised training: the loss falls, sharing changes nothing, and what is written is the trained model."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from psrl.errors import InputError
from psrl.offline.job import OfflineReport, run_offline
from psrl.offline.options import OfflineOptions
from tests.helpers import make_checkpoint


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    """Conversations whose observations repeat and whose actions follow from them."""
    path = tmp_path_factory.mktemp("traces") / "oracle.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        for trial in range(4):
            messages = [{"role": "system", "content": "Go where you are told."}]
            for turn in range(3):
                place = ("north", "south", "east", "west")[(trial + turn) % 4]
                messages += [
                    {"role": "user", "content": f"To the {place}."}, {"role": "assistant", "content": f"go {place}"},
                ]  # fmt: skip
            stream.write(json.dumps({"task": "go", "trial": trial, "messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tied=True, vocab=300)


def train(traces: Path, model: str, out: Path, **options) -> tuple[OfflineReport, list[str]]:
    lines: list[str] = []
    values = {"epochs": 2, "batch": 5, "lr": 2e-3, "max_tokens": 64, "tokenizer": "bytes", **options}
    made = OfflineOptions(files=(traces,), model=model, out=out, objective="sft", **values)
    return run_offline(made, lines.append), lines


def losses(report: OfflineReport) -> list[float]:
    return [step.metrics["loss"] for step in report.steps]


def hf_loss(folder: str | Path, report: OfflineReport, traces: Path) -> float:
    """Loss over all samples through transformers, each alone."""
    from psrl.data import load_samples, load_tokenizer

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total = 0.0
    samples = load_samples([traces], tokenizer=lambda: load_tokenizer("bytes")).samples
    for sample in samples:
        ids, mask = torch.from_numpy(sample.input_ids_N), torch.from_numpy(sample.loss_mask_N)
        with torch.no_grad():
            log_probs = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total -= float(log_probs[mask[1:]].sum())
    return total / report.num_targets


def test_losses_fall_and_are_the_same_with_and_without_sharing(traces, model, tmp_path):
    reports = {s: train(traces, model, tmp_path / s, sharing=s, dtype="float64")[0] for s in ("on", "off")}
    shared, plain = reports["on"].steps, reports["off"].steps
    assert [step.epoch for step in shared] == [1, 1, 1, 2, 2, 2]
    assert losses(reports["on"]) == pytest.approx(losses(reports["off"]), rel=1e-9)
    for a, b in zip(shared, plain, strict=True):
        norm = b.metrics["grad_norm"]
        assert a.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)  # upstream rounds norms to float32
        assert a.unique_tokens < a.tokens and b.unique_tokens is None
    assert sum(step.unique_tokens for step in shared) < 0.6 * sum(step.tokens for step in shared)
    assert sum(losses(reports["on"])[3:]) < 0.9 * sum(losses(reports["on"])[:3])
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / s, dtype="auto").state_dict() for s in ("on", "off")]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=1e-6, atol=1e-8), name


def test_what_is_written_is_the_trained_model(traces, model, tmp_path):
    report, lines = train(traces, model, tmp_path / "out", epochs=1, batch=100, metrics=tmp_path / "metrics.jsonl")
    (loss,) = losses(report)
    assert loss == pytest.approx(hf_loss(model, report, traces), rel=1e-5)
    after = hf_loss(tmp_path / "out", report, traces)
    assert after < loss
    again, _ = train(traces, str(tmp_path / "out"), tmp_path / "second", epochs=1, batch=100)
    assert losses(again) == [pytest.approx(after, rel=1e-5)]
    (step,) = report.steps
    assert lines == [
        "1 processes, 1 data-parallel ranks; 12 samples, 1 steps of 100; sft, prefixes shared",
        f"step 1/1: loss {loss:.6g}, grad norm {step.metrics['grad_norm']:.6g}, 12 samples, {step.tokens:,} tokens, "
        f"{step.unique_tokens:,} of them computed, imbalance 1.00, {step.seconds:.2f} s",
        f"wrote {tmp_path / 'out'}",
    ]
    (written,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(written)["metrics"]["loss"] == loss
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == ("llama", "float32", True)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_random_model_and_a_first_step_of_warmup(traces, tmp_path):
    report, _ = train(traces, "tiny-qwen3", tmp_path / "out", epochs=1, batch=12, warmup=5, limit=2, mode="trajectory")
    assert report.num_samples == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen3"


def test_nothing_to_train_on(tmp_path):
    path = tmp_path / "no.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [0, 0]}\n')
    with pytest.raises(InputError, match="none of the samples has a target"):
        run_offline(OfflineOptions(files=(path,), model="tiny-qwen2", objective="sft", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_command(traces, model, tmp_path):
    flags = ["--model", model, "--out", str(tmp_path / "o"), "--tokenizer", "bytes", "--batch", "6"]
    command = [sys.executable, "-m", "psrl.cli.main", "sft", str(traces), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, *steps, last = done.stdout.splitlines()
    assert first == "psrl: 1 processes, 1 data-parallel ranks; 12 samples, 2 steps of 6; sft, prefixes shared"
    assert [line.split(":")[1] for line in steps] == [" step 1/2", " step 2/2"]
    assert last == f"psrl: wrote {tmp_path / 'o'}"
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr == f"psrl: error: --out {tmp_path / 'o'}: exists and is not an empty folder: name another\n"
