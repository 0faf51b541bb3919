"""``psrl replay`` end to end on tiny models: against independent samples, and with sharing against without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from psrl.cli.main import app
from psrl.replay import phases
from psrl.replay.options import LOSSES
from tests.helpers import Row, hf_truth, make_checkpoint, ppo_loss_fn, relative_errors

TINY = ("--hidden", "32", "--layers", "2", "--dtype", "float64")
PHASES = ("old_log_prob", "ref", "update")


def psrl(*args: object):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


def run(*args: object) -> str:
    result = psrl(*args)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


def tree_rows(num_groups: int = 2, seed: int = 0) -> list[Row]:
    """Groups of three samples that branch off one prompt at different places, with masked tokens inside responses."""
    g = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(4, 120, (count,), generator=g).tolist()

    rows = []
    for group in range(num_groups):
        trunk = ids(12)
        for fork in (12, 9, 5):
            response = ids(6)
            mask = [0] * fork + [1, 1, 0, 1, 0, 1]
            advantages = torch.randn(4, generator=g, dtype=torch.float64).tolist()
            old = (-4.8 + 0.1 * torch.randn(4, generator=g, dtype=torch.float64)).tolist()
            rows.append(Row(trunk[:fork] + response, mask, advantages, old, uid=f"g{group}"))
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    def fields(row: Row) -> dict[str, Any]:
        values = {"input_ids": row.input_ids, "loss_mask": row.loss_mask, "uid": row.uid}
        given = {"position_ids": row.position_ids, "advantage": row.advantages, "old_log_probs": row.old_log_probs}
        return values | {key: value for key, value in given.items() if value}

    path.write_text("".join(json.dumps(fields(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write(tmp_path / "samples.jsonl", tree_rows())


def check_dump(dump: Path, model: str, rows: list[Row], tolerance: float = 2e-6, **loss: Any) -> None:
    """A dump against every sample alone in transformers."""
    truth = hf_truth(model, rows, ppo_loss_fn(**loss), calculate_entropy=True)
    got = load_file(dump / "samples.safetensors")
    assert len(got) == 2 * len(rows)
    for index, row in enumerate(rows):
        targets = torch.tensor(row.loss_mask[1:]).bool()
        for key, wanted in (("log_probs", truth.log_probs), ("entropy", truth.entropies)):
            torch.testing.assert_close(got[f"{key}.{index}"], wanted[index][targets], rtol=tolerance, atol=tolerance)
    errors = relative_errors(load_file(dump / "grads.safetensors"), truth.grads)
    assert max(errors.values()) <= tolerance


# --------------------------------------------------------------------------------------- against independent samples
@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_dump_equals_independent_samples(tmp_path: Path, model: str, samples: Path, sharing: str, loss: str):
    dump = tmp_path / "D"
    run(samples, "--model", model, "--dtype", "float64", "--sharing", sharing, "--max-tokens", 5, "--loss", loss,
        "--dump", dump)  # fmt: skip
    agg = "seq-mean-token-mean" if loss == "gspo" else "token-mean"
    check_dump(dump, model, tree_rows(), loss_mode=loss, loss_agg_mode=agg)


def test_positions_masks_and_short_samples(tmp_path: Path, model: str):
    """Explicit positions; a sample without target; one of a single token; equal samples with opposite advantages."""
    rows = [
        Row([5, 6, 7, 8, 9], [0, 1, 1, 0, 1], [1.0, -2.0, 0.5], [-4.0, -5.0, -4.5], position_ids=[0, 1, 5, 6, 7]),
        Row([5, 6, 7, 8, 9], [0, 1, 1, 0, 1], [-1.0, 2.0, -0.5], [-4.0, -5.0, -4.5], position_ids=[0, 1, 5, 6, 7]),
        Row([5, 6, 7], [0, 0, 0]),
    ]
    single = json.dumps({"input_ids": [5], "loss_mask": [0]}) + "\n"
    path = write(tmp_path / "s.jsonl", rows)
    path.write_text(path.read_text() + single)
    dump = tmp_path / "D"
    run(path, "--model", model, "--dtype", "float64", "--max-tokens", 2, "--dump", dump)
    got = load_file(dump / "samples.safetensors")
    assert [len(got[f"log_probs.{row}"]) for row in range(4)] == [3, 3, 0, 0]
    truth = hf_truth(model, rows, ppo_loss_fn())
    assert max(relative_errors(load_file(dump / "grads.safetensors"), truth.grads).values()) <= 2e-6


def test_no_target_at_all_has_gradient_zero(tmp_path: Path, model: str):
    path = write(tmp_path / "s.jsonl", [Row([5, 6, 7], [0, 0, 0]), Row([5, 6], [0, 0])])
    dump = tmp_path / "D"
    run(path, "--model", model, "--dtype", "float64", "--dump", dump)
    assert all(not gradient.any() for gradient in load_file(dump / "grads.safetensors").values())
    assert len(load_file(dump / "samples.safetensors")["log_probs.1"]) == 0


def test_dump_holds_the_first_mini_batchs_gradient(tmp_path: Path, model: str, samples: Path):
    dump = tmp_path / "D"
    run(samples, "--model", model, "--dtype", "float64", "--mini-batch", 4, "--steps", 2, "--lr", 0.01, "--dump", dump)
    truth = hf_truth(model, tree_rows()[:4], ppo_loss_fn())
    assert max(relative_errors(load_file(dump / "grads.safetensors"), truth.grads).values()) <= 2e-6
    summary = json.loads((dump / "summary.json").read_text())
    assert len(summary["metrics"]) == 4  # two steps of a full and a smaller mini-batch
    assert summary["metrics"][0]["loss"] == pytest.approx(truth.loss, rel=1e-6)


# ----------------------------------------------------------------------------------------------- shared and unshared
def test_both_sides_and_the_table(tmp_path: Path, samples: Path):
    path = tmp_path / "r.json"
    table = run(samples, *TINY, "--sharing", "both", "--max-tokens", 7, "--repeat", 2, "--kl-coef", 0.1,
                "--entropy-coeff", 0.01, "--temperature", 0.7, "--json", path)  # fmt: skip
    record = json.loads(path.read_text())
    assert (record["samples"], record["tokens"], record["targets"]) == (6, 88, 24)
    assert record["unique_tokens"] == 60
    assert record["prefix_match_rate"] == pytest.approx(28 / 88)
    assert record["kv_bytes_peak"] == record["kv_bytes_predicted"] > 0
    assert record["spine_tokens"] > 0
    for phase in PHASES:
        values = record[phase]
        assert values["speedup"] == pytest.approx(values["seconds_unshared"] / values["seconds_shared"])
        assert values["ideal_speedup"] > 1
        assert len(values["all_seconds_shared"]) == len(values["all_seconds_unshared"]) == 2
    assert {d["quantity"] for d in record["comparison"]} == {
        "old log-probs", "entropies", "reference log-probs", "gradients", "metrics"
    }  # fmt: skip
    assert all(d["within"] and d["worst"] <= 1e-9 for d in record["comparison"])
    for word in ("match rate", "31.8 %", "old log-prob", "reference", "update", "speed-up", "ideal"):
        assert word in table


@pytest.mark.parametrize("sharing", ["on", "off"])
def test_one_side_leaves_the_others_figures_out(tmp_path: Path, samples: Path, sharing: str):
    path = tmp_path / "r.json"
    run(samples, *TINY, "--sharing", sharing, "--json", path)
    record = json.loads(path.read_text())
    assert record["unique_tokens"] == 60
    here, there = ("shared", "unshared") if sharing == "on" else ("unshared", "shared")
    for phase in PHASES:
        assert record[phase][f"seconds_{here}"] > 0
        assert record[phase][f"seconds_{there}"] is None
        assert record[phase]["speedup"] is None
    assert (record["kv_bytes_peak"] is None) == (sharing == "off")
    assert record["comparison"] is None


def test_a_difference_beyond_tolerance_is_exit_code_1(tmp_path: Path, samples: Path):
    path = tmp_path / "r.json"
    result = psrl(samples, "--hidden", 32, "--layers", 1, "--sharing", "both", "--tolerance", 1e-12, "--json", path)
    assert result.exit_code == 1
    assert "TOO LARGE" in result.stdout
    assert any(not d["within"] for d in json.loads(path.read_text())["comparison"])


def test_bfloat16_is_reported_only(samples: Path):
    run(samples, "--hidden", 32, "--layers", 1, "--dtype", "bfloat16", "--sharing", "both")


def test_every_loss_of_verl(samples: Path):
    assert set(LOSSES) == set(POLICY_LOSS_REGISTRY)
    for loss in LOSSES:
        run(samples, *TINY, "--sharing", "both", "--loss", loss)


def test_losses_that_depend_on_micro_batches_are_not_compared(samples: Path):
    result = psrl(samples, *TINY, "--sharing", "both", "--loss", "geo_mean", "--max-tokens", 20)
    assert result.exit_code == 0
    assert "gradients and metrics are not compared" in result.stderr
    assert "gradients" not in result.stdout


@pytest.mark.parametrize("flags", [("--recompute", "full"), ("--attention", "reference"), ("--recompute", "selective")])
def test_recompute_and_attention(samples: Path, flags: tuple[str, ...]):
    run(samples, *TINY, "--sharing", "both", "--max-tokens", 7, *flags)


def test_waves(tmp_path: Path, samples: Path):
    path = tmp_path / "r.json"
    run(samples, *TINY, "--max-tokens", 5, "--json", path)
    record = json.loads(path.read_text())
    assert record["waves"] == 1
    budget = record["kv_bytes_peak"] - 1
    run(samples, *TINY, "--sharing", "both", "--max-tokens", 5, "--kv-cache-bytes", budget, "--json", path)
    record = json.loads(path.read_text())
    assert record["waves"] > 1
    assert record["kv_bytes_peak"] == record["kv_bytes_predicted"] <= budget


def test_host_tier(tmp_path: Path, samples: Path):
    path = tmp_path / "r.json"
    run(samples, *TINY, "--layers", 8, "--max-tokens", 5, "--json", path)
    whole = json.loads(path.read_text())
    assert whole["kv_bytes_to_host"] == whole["kv_host_bytes_peak"] == 0
    budget = int(0.1 * whole["kv_bytes_peak"])
    limits = ("--kv-cache-bytes", budget, "--kv-host-bytes", 1 << 30)
    text = run(samples, *TINY, "--layers", 8, "--max-tokens", 5, *limits, "--json", path)
    record = json.loads(path.read_text())
    assert record["kv_bytes_peak"] == record["kv_bytes_predicted"] <= budget
    for phase in PHASES:
        for name in ("kv_host_bytes", "kv_bytes_to_host", "kv_bytes_to_device"):
            measured = record[phase]["kv_host_bytes_peak" if name == "kv_host_bytes" else name]
            assert measured == record[phase][f"{name}_predicted"] > 0
    assert f"{record['kv_bytes_to_device']:,}" in text


def test_budget_that_holds_nothing_is_an_error(samples: Path):
    result = psrl(samples, *TINY, "--max-tokens", 3, "--kv-cache-bytes", 1)
    assert result.exit_code == 2
    assert "--kv-cache-bytes allows 1" in result.stderr
    assert result.stderr.count("\n") == 1


def test_qwen3_and_chat_rows(tmp_path: Path):
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}] * 3
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"task": "t", "trial": 0, "reward": 1.0, "messages": messages}) + "\n")
    record = tmp_path / "r.json"
    run(path, *TINY, "--model", "tiny-qwen3", "--sharing", "both", "--json", record)
    assert json.loads(record.read_text())["samples"] == 3
    run(path, *TINY, "--model", "tiny-qwen3", "--mode", "trajectory", "--json", record)
    assert json.loads(record.read_text())["samples"] == 1


def test_a_model_without_chatml_tokens_gets_bytes(tmp_path: Path):
    model = make_checkpoint(tmp_path / "M", vocab=258)
    path = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}]
    path.write_text(json.dumps({"task": "t", "trial": 0, "messages": messages}) + "\n")
    result = psrl(path, "--model", model)
    assert result.exit_code == 0
    assert "chat rows are tokenised as bytes" in result.stderr


def test_an_interrupted_run_writes_nothing(tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch):
    update = phases.PhaseRunner._update

    def interrupt(self, side, run):
        update(self, side, run)
        raise KeyboardInterrupt

    monkeypatch.setattr(phases.PhaseRunner, "_update", interrupt)
    result = psrl(samples, *TINY, "--dump", tmp_path / "D", "--json", tmp_path / "r.json")
    assert result.exit_code == 130
    assert result.stderr == "psrl: interrupted\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples.jsonl"]


# ------------------------------------------------------------------------------------------------ what cannot be run
def failure(*args: object) -> str:
    result = psrl(*args)
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_too_small_a_cache_names_the_options_and_the_sample(samples: Path):
    message = failure(samples, *TINY, "--max-tokens", 5, "--kv-cache-bytes", 100, "--mini-batch", 3)
    assert f"{samples}:4: sample 3 (18 tokens)" in message
    assert "--kv-cache-bytes allows 100" in message
    assert "raise --max-tokens" in message


@pytest.mark.parametrize("sharing", ["on", "off"])
def test_log_probs_that_are_not_finite(tmp_path: Path, samples: Path, sharing: str):
    folder = Path(make_checkpoint(tmp_path / "M", "qwen2"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = failure(samples, "--model", folder, "--sharing", sharing, "--json", tmp_path / "r.json")
    assert f"{samples}:1: log_probs of target 0 is not finite" in message
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("sharing", ["on", "off"])
def test_a_loss_that_is_not_finite(tmp_path: Path, model: str, sharing: str):
    rows = tree_rows()
    for row in rows[3:]:
        row.advantages = [3e38, 3e38, 3e38, 3e38]
    path = write(tmp_path / "s.jsonl", rows)
    message = failure(path, "--model", model, "--sharing", sharing, "--mini-batch", 3)
    assert f"{path}:4: " in message
    assert "not finite" in message
