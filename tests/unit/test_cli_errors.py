"""What the command line accepts, and what it says when it cannot go on: one line on stderr and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from psrl.cli.main import app
from psrl.errors import ConfigError
from psrl.replay import job, options
from psrl.replay.model import vocabulary_for

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
CHAT = {"task": "t", "trial": 0, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch):
    """No model is built: an error has to come before."""

    def refuse(*_):
        raise AssertionError("the input was not refused")

    monkeypatch.setattr(job, "_run", refuse)
    monkeypatch.setattr(job, "quietly", lambda run: run())


def psrl(*args: object):
    return CliRunner().invoke(app, ["replay", *map(str, args)], env={"COLUMNS": "200"})


def error_of(*args: object) -> str:
    """The one line, without its prefix."""
    result = psrl(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    prefix = "psrl: error: "
    assert result.stderr.startswith(prefix)
    assert result.stderr.count("\n") == 1
    return result.stderr[len(prefix) : -1]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "good.jsonl", GOOD)


def model_folder(path: Path, *, weights: bool = True, **config: object) -> Path:
    path.mkdir()
    values = {"model_type": "qwen2", "vocab_size": 512, "attention_dropout": 0.0, **config}
    (path / "config.json").write_text(json.dumps(values))
    if weights:
        (path / "model.safetensors").touch()
    return path


# ------------------------------------------------------------------------------------------------------------- input
def test_missing_file(tmp_path: Path):
    path = tmp_path / "gone.jsonl"
    assert error_of(path) == f"{path}: cannot read the file: No such file or directory"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"input_ids": [1,', "broken JSON row: Expecting value (column 18)"),
        ({**GOOD, "loss_mask": [0, 1]}, "loss_mask has 2 entries, but input_ids has 4"),
        (
            {**GOOD, "loss_mask": [1, 1, 0, 1]},
            "the first loss_mask entry is 1, but nothing precedes the first token to predict it",
        ),
        ({**GOOD, "advantage": float("nan")}, "advantage must be a finite float32 number, got NaN"),
        ({**GOOD, "advantage": [1.0, float("inf")]}, "advantage[1] must be a finite float32 number, got inf"),
        ({**GOOD, "input_ids": [5, -6, 7, 8]}, "input_ids[1] must be in 0 .. 2147483647, got -6"),
        (
            {**GOOD, "input_ids": [5, 6, 262144, 8]},
            "token id 262144 is outside the vocabulary: a random model has at most 262144 ids",
        ),
    ],
)
def test_bad_row(tmp_path: Path, row: object, message: str):
    path = write(tmp_path / "bad.jsonl", GOOD, row, GOOD)
    assert error_of(path) == f"{path}:2: {message}"


def test_empty_file(tmp_path: Path):
    path = write(tmp_path / "empty.jsonl")
    assert error_of(path) == f"{path}: no samples: no rows in the file"


def test_id_outside_the_models_vocabulary(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", GOOD, {**GOOD, "input_ids": [5, 600, 7, 8]})
    model = model_folder(tmp_path / "M")
    wanted = f"{path}:2: token id 600 (token 1) is outside the vocabulary: {model} has 512 ids"
    assert error_of(path, "--model", model) == wanted


def test_chat_row_without_chatml_tokens(tmp_path: Path):
    from tokenizers import Tokenizer, models

    path = write(tmp_path / "c.jsonl", CHAT)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    message = error_of(path, "--tokenizer", tmp_path)
    assert message.startswith(f"{path}:1: the tokenizer {tmp_path}/tokenizer.json has no <|im_start|>")


def test_positions_need_sharing(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", GOOD, {**GOOD, "position_ids": [0, 1, 2, 9]})
    for sharing in ("off", "both"):
        assert error_of(path, "--sharing", sharing).startswith(f"{path}:2: position_ids are not 0, 1, 2, ...")


def test_mini_batch_without_target_needs_sharing(tmp_path: Path):
    path = write(tmp_path / "s.jsonl", GOOD, {**GOOD, "loss_mask": [0, 0, 0, 0]})
    for sharing in ("off", "both"):
        message = error_of(path, "--sharing", sharing, "--mini-batch", 1)
        assert message.startswith(f"{path}:2: the mini-batch of 1 samples that begins here has no target")


# ----------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--max-tokens", "-5"], "--max-tokens must be at least 1, got -5"),
        (["--mini-batch", "0"], "--mini-batch must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--kv-cache-bytes", "0"], "--kv-cache-bytes must be at least 1, got 0"),
        (["--kv-host-bytes", "0"], "--kv-host-bytes must be at least 1, got 0"),
        (["--kv-host-bytes", "9", "--pp", "2"], "--kv-host-bytes needs the plan's order, which --pp 2 does not keep"),
        (
            ["--kv-host-bytes", "9", "--system", "radix"],
            "--kv-host-bytes is psrl's own: it does not go with --system radix",
        ),
        (["--seed", "-1"], "--seed must be in 0 .. 4294967295, got -1"),
        (["--seed", "4294967296"], "--seed must be in 0 .. 4294967295, got 4294967296"),
        (["--lr", "nan"], "--lr must be a finite number and not negative, got nan"),
        (["--temperature", "0"], "--temperature must be at least 1e-06, got 0"),
        (["--temperature", "1e-30"], "--temperature must be at least 1e-06, got 1e-30"),
        (["--sharing", "maybe"], "--sharing must be one of on, off, both, got 'maybe'"),
        (["--dtype", "int8"], "--dtype must be one of float32, float64, bfloat16, got 'int8'"),
        (["--mode", "turn"], "--mode must be one of step, trajectory, got 'turn'"),
        (["--recompute", "some"], "--recompute must be one of none, selective, full, got 'some'"),
        (["--hidden", "30"], "--hidden 30 must be a multiple of 2 x --heads 4"),
        (["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
    ],
)
def test_bad_option(good: Path, args: list[str], message: str):
    assert error_of(good, *args) == message


def test_usage_errors_are_one_line_too(good: Path):
    """The wording is typer's."""
    assert "--max-tokens" in error_of(good, "--max-tokens", "many")
    assert "--no-such-option" in error_of(good, "--no-such-option")
    assert "FILE" in error_of()


def test_unknown_loss(good: Path):
    assert error_of(good, "--loss", "dpo").startswith("--loss must be one of vanilla, gspo, ")
    assert error_of(good, "--loss-agg-mode", "mean").startswith("--loss-agg-mode must be one of token-mean, ")


def test_default_aggregation():
    modes = {loss: options.ReplayOptions((Path("f"),), loss=loss).effective_loss_agg_mode for loss in options.LOSSES}
    assert {loss for loss, mode in modes.items() if mode != "token-mean"} == {"gspo"}
    assert modes["gspo"] == "seq-mean-token-mean"


def test_options_are_checked_without_a_command_line():
    with pytest.raises(ConfigError, match="no input files"):
        options.ReplayOptions(())


# ------------------------------------------------------------------------------------------------------------- model
def test_missing_model(good: Path, tmp_path: Path):
    message = error_of(good, "--model", tmp_path / "gone")
    names = "tiny-qwen2 or tiny-qwen3 or tiny-qwen3-moe or smollm2"
    assert message == f"--model {tmp_path / 'gone'}: no such folder (or use {names})"
    message = error_of(good, "--model", "")
    assert message == f"--model is empty: name a folder, or {names}"


def test_unsupported_model(good: Path, tmp_path: Path):
    folder = model_folder(tmp_path / "M", model_type="mamba")
    message = error_of(good, "--model", folder)
    assert message.startswith(f"{folder}/config.json: unsupported model: model_type 'mamba'")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, but prefix sharing needs dropout 0"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' is not supported"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"hidden_size": -32}, "hidden_size must be a positive integer, got -32"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a positive integer, got 2.5"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer, got '4'"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size 30 must be a multiple of num_attention_heads 4"),
        ({"hidden_act": "gelu"}, "unsupported model: hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "unsupported model: quantization_config"),
    ],
)
def test_model_with_an_unusable_option(good: Path, tmp_path: Path, config: dict, message: str):
    folder = model_folder(tmp_path / "M", **config)
    assert error_of(good, "--model", folder).startswith(f"{folder}/config.json: {message}")


def test_model_without_weights_or_config(good: Path, tmp_path: Path):
    folder = model_folder(tmp_path / "M", weights=False)
    assert error_of(good, "--model", folder).startswith(f"{folder}: no weights: expected model.safetensors")
    (folder / "pytorch_model.bin").touch()
    assert error_of(good, "--model", folder).startswith(f"{folder}: no weights: expected model.safetensors")
    (folder / "config.json").write_text("{")
    assert error_of(good, "--model", folder).startswith(f"{folder}/config.json: broken JSON")
    (folder / "config.json").unlink()
    assert error_of(good, "--model", folder).startswith(f"{folder}/config.json: cannot read the file")


def test_vocabulary_of_a_random_model():
    assert vocabulary_for(0, "x") == 512
    assert vocabulary_for(511, "x") == 512
    assert vocabulary_for(512, "x") == 640
    assert vocabulary_for(262_143, "x") == 262_144


# ------------------------------------------------------------------------------------------------------------ output
def test_dump_into_a_folder_of_something_else(good: Path, tmp_path: Path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    message = error_of(good, "--dump", folder)
    assert message == f"--dump {folder}: the folder holds 'thesis.tex', which is no part of a dump: name another"
    assert [entry.name for entry in folder.iterdir()] == ["thesis.tex"]


def test_output_folder_is_missing(good: Path, tmp_path: Path):
    assert error_of(good, "--dump", tmp_path / "no" / "D").endswith(f"the folder {tmp_path / 'no'} does not exist")
    assert error_of(good, "--json", tmp_path / "no" / "j").endswith(f"the folder {tmp_path / 'no'} does not exist")
    assert error_of(good, "--json", tmp_path) == f"--json {tmp_path}: is a folder"
    assert error_of(good, "--dump", good) == f"--dump {good}: exists and is not a folder"


# ------------------------------------------------------------------------------------------------------- the program
def test_interrupt(good: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_run", interrupt)
    result = psrl(good)
    assert result.exit_code == 130
    assert result.stderr == "psrl: interrupted\n"


def test_interrupt_during_the_first_imports():
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nfrom psrl.cli.main import app\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "psrl: interrupted\n")


def test_a_bug_is_not_reported_as_a_users_error(good: Path):
    result = psrl(good)
    assert isinstance(result.exception, AssertionError)


def test_process_exits_with_2_and_without_a_traceback(tmp_path: Path):
    command = [sys.executable, "-m", "psrl.cli.main", "replay", str(tmp_path / "gone.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"psrl: error: {tmp_path}/gone.jsonl: cannot read the file: No such file or directory\n"


def test_help_and_errors_do_not_load_torch():
    code = (
        "import sys\nfrom psrl.cli.main import app\n"
        "try:\n    app(['replay', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "from psrl.replay.job import run_replay\nassert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "psrl 0.1.0\n")


def test_public_options_are_these():
    command = typer.main.get_command(app)
    assert {"replay", "sft"} <= command.commands.keys()  # type: ignore[attr-defined]

    def options(name: str) -> list[str]:
        params = command.commands[name].params  # type: ignore[attr-defined]
        return sorted(name for param in params for name in (param.opts or [param.name]) if name != "--help")

    assert options("sft") == [
        "--batch", "--dtype", "--epochs", "--limit", "--lr", "--max-tokens", "--metrics", "--mode", "--model", "--out",
        "--seed", "--sharing", "--tokenizer", "--warmup", "files",
    ]  # fmt: skip
    assert options("replay") == [
        "--attention", "--cp", "--dp", "--dtype", "--dump", "--entropy-coeff", "--ep", "--heads", "--hidden", "--json",
        "--kl-coef", "--kv-cache-bytes", "--kv-heads", "--kv-host-bytes", "--kv-recompute", "--layers", "--limit",
        "--loss",
        "--loss-agg-mode", "--loss-scale-factor", "--lr", "--max-tokens", "--mini-batch", "--mode", "--model", "--pp",
        "--recompute", "--repeat", "--seed", "--sharing", "--steps", "--system", "--temperature", "--tokenizer",
        "--tolerance", "--tp", "--unshared-attention", "--vpp", "files",
    ]  # fmt: skip
