"""Model folders whose weights and configuration do not belong together, or that are broken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.errors import PSRLError
from psrl.replay.checkpoint import INDEX, check_weights
from tests.helpers import make_checkpoint

KINDS = ("deepseek_v3", "llama", "qwen2", "qwen3", "qwen3_moe")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_checkpoint(tmp_path / "M", "qwen2"))


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """The same weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(PSRLError) as error:
        check_weights(folder)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_checkpoints_pass(tmp_path: Path, kind: str, tied: bool):
    folder = Path(make_checkpoint(tmp_path / "M", kind, tied=tied))
    check_weights(folder)
    change(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    check_weights(folder)
    shard(folder)
    check_weights(folder)


def test_missing_and_left_over_tensors(folder: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda weights: weights.pop(name))
    assert refusal(folder) == f"{folder}: the weights have no tensor {name}, which config.json asks for"
    change(folder, lambda weights: weights.update({name: torch.ones(64, 32), "extra": torch.ones(1)}))
    assert "has no tensor extra" in refusal(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 256}, "embed_tokens.weight has shape [128, 32], but config.json asks for [256, 32]"),
        ({"vocab_size": 64}, "embed_tokens.weight has shape [128, 32], but config.json asks for [64, 32]"),
        ({"hidden_size": 64}, "has shape [128, 32], but config.json asks for [128, 64]"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight has shape [64, 32]"),
        ({"num_key_value_heads": 1}, "k_proj.weight has shape [16, 32]"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but the weights have 2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the weights have 2"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, but the weights have 2"),
        ({"model_type": "qwen3", "head_dim": 8}, "q_norm.weight"),
        ({"model_type": "llama"}, "has no tensor"),
        ({"tie_word_embeddings": True}, f"{HEAD} differs from {EMBEDDING}"),
    ],
)
def test_another_models_configuration(folder: Path, values: dict, message: str):
    values = {"layer_types": None, **values}
    configure(folder, **values)
    assert message in refusal(folder)


def test_a_tied_head_on_disk_must_be_the_embedding(tmp_path: Path):
    folder = Path(make_checkpoint(tmp_path / "M", "llama", tied=True))
    change(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    check_weights(folder)
    change(folder, lambda weights: weights[HEAD].add_(1))
    assert f"{HEAD} differs" in refusal(folder)
    configure(folder, tie_word_embeddings=False)
    check_weights(folder)
    change(folder, lambda weights: weights.pop(HEAD))
    assert f"no tensor {HEAD}" in refusal(folder)


def test_integer_weights(folder: Path):
    change(folder, lambda weights: weights.update({EMBEDDING: weights[EMBEDDING].to(torch.int8)}))
    assert f"{EMBEDDING} has dtype I8" in refusal(folder)


def test_broken_files(folder: Path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", b"garbage", b"\xff" * 100, whole[: len(whole) // 2], whole[:20]):
        file.write_bytes(content)
        assert refusal(folder).startswith(f"{file}: not a whole safetensors file")
    file.unlink()
    (folder / "pytorch_model.bin").touch()
    assert "no weights: expected model.safetensors" in refusal(folder)


def test_broken_indices(folder: Path):
    shard(folder)
    index = folder / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert refusal(folder) == f"{index}: names b.safetensors, which is not in the folder"
    index.unlink()
    check_weights(folder)
    for values in ({}, [], {"weight_map": {}}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(values))
        assert refusal(folder).startswith(f"{index}: ")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "a.safetensors")}))
    assert "should be in a.safetensors, which does not have it" in refusal(folder)


def test_a_tensor_in_two_files(folder: Path):
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "is in copy.safetensors too" in refusal(folder)


def test_values_of_a_wrong_type(folder: Path):
    configure(folder, rms_norm_eps="small")
    assert refusal(folder).startswith(f"{folder}/config.json: ")


@pytest.mark.parametrize("command", ["replay", "sft"])
def test_the_command_line_says_it_in_one_line(tmp_path: Path, folder: Path, command: str):
    samples = tmp_path / "s.jsonl"
    samples.write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) + "\n")
    (folder / "model.safetensors").write_bytes(b"garbage")
    out = ["--out", str(tmp_path / "out")] if command == "sft" else []
    result = CliRunner().invoke(app, [command, str(samples), "--model", str(folder), *out])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"{folder}/model.safetensors: not a whole safetensors file" in result.stderr
