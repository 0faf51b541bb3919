"""``psrl replay`` on several local processes gives what one process gives."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from psrl.cli.main import app
from tests.helpers import relative_errors
from tests.integration.test_replay import tree_rows, write

TINY = ("--hidden", "32", "--layers", "4", "--dtype", "float64", "--max-tokens", "9", "--mini-batch", "5")


def psrl(*args: object):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--model", "tiny-qwen3-moe", "--tp", 2, "--ep", 2), id="tp-ep"),
        pytest.param(("--model", "tiny-qwen3", "--pp", 2, "--vpp", 2), id="vpp", marks=pytest.mark.slow),
        pytest.param(("--dp", 2, "--tp", 2, "--sharing", "both"), id="dp-tp-both", marks=pytest.mark.slow),
        pytest.param(("--model", "tiny-qwen3-moe", "--dp", 2, "--ep", 2), id="dp-ep", marks=pytest.mark.slow),
        pytest.param(("--model", "tiny-qwen3", "--cp", 2, "--dp", 2), id="cp-dp", marks=pytest.mark.slow),
        pytest.param(("--model", "tiny-qwen3-moe", "--cp", 2, "--ep", 2), id="cp-ep", marks=pytest.mark.slow),
    ],
)
def test_dump_equals_one_process(tmp_path: Path, flags: tuple):
    """Five rows a mini-batch, so that data-parallel ranks need padding."""
    path = write(tmp_path / "samples.jsonl", tree_rows())
    model = flags[:2] if flags[0] == "--model" else ()
    for name, more in (("one", model), ("many", flags)):
        result = psrl(path, *TINY, *more, "--dump", tmp_path / name)
        assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    for file in ("samples.safetensors", "grads.safetensors"):
        one, many = (load_file(tmp_path / name / file) for name in ("one", "many"))
        assert max(relative_errors(many, one).values()) <= 1e-9


@pytest.mark.slow
def test_context_parallel_without_sharing_needs_transformer_engine(tmp_path: Path):
    path = write(tmp_path / "samples.jsonl", tree_rows())
    result = psrl(path, *TINY, "--cp", 2, "--sharing", "both")
    assert result.exit_code == 2
    assert "context_parallel_size=2 without prefix sharing needs TransformerEngine's attention" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", 0), "--tp must be at least 1, got 0"),
        (("--vpp", 2), "--vpp 2 needs --pp of at least 2"),
        (("--cp", 0), "--cp must be at least 1, got 0"),
        (("--ep", 2), "--ep 2 must divide --tp x --cp x --dp, which is 1"),
        (("--ep", 2, "--dp", 2), "--ep 2: tiny-qwen2 has no experts; use --model tiny-qwen3-moe"),
    ],
)
def test_layouts_that_cannot_be(tmp_path: Path, flags: tuple, message: str):
    path = write(tmp_path / "samples.jsonl", tree_rows())
    result = psrl(path, *flags)
    assert result.exit_code == 2 and message in result.output
