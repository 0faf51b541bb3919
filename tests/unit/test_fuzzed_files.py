"""Whatever is in a file, every command that reads samples ends with a result or with one line: never a traceback."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import psrl.offline.job
import psrl.replay.job
from psrl.cli.main import app

TOKENS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "uid": "a", "session": "a0", "index": 0}
CHAT = {
    "task": "t",
    "trial": 0,
    "reward": 1.0,
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "go north"}],
}
COMMANDS = ("replay", "sft", "analyze", "plan")
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class FileWasRead(Exception):
    """The reader had no complaint: what follows it builds a model, which is not what is tested here."""


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object):
        raise FileWasRead

    monkeypatch.setattr(psrl.replay.job, "quietly", stop)
    monkeypatch.setattr(psrl.offline.job, "quiet_upstream", stop)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def outcome(command: str, path: Path, *args: object) -> str:
    """ "read", or the message. Fails on anything that a user should not see."""
    results = path.parent / "results"
    more = {"sft": ["--model", "tiny-qwen2", "--out", str(results)], "analyze": ["--json", str(results)]}
    command_line = [command, str(path), *map(str, args), *more.get(command, [])]
    result = CliRunner().invoke(app, command_line, env={"COLUMNS": "200"})
    if isinstance(result.exception, FileWasRead) or result.exit_code == 0:
        return "read"
    assert isinstance(result.exception, SystemExit), f"{command}: {result.exception!r}"
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    *notes, error = result.stderr.removesuffix("\n").split("\n")
    assert all(line.startswith("psrl: ") for line in notes) and error.startswith("psrl: error: "), result.stderr
    return error.removeprefix("psrl: error: ")


def outcomes(path: Path, *args: object) -> set[str]:
    """Of all four commands."""
    return {"read" if (said := outcome(command, path, *args)) == "read" else said for command in COMMANDS}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# ------------------------------------------------------------------------------------------------------- damaged files
@pytest.mark.parametrize("command", COMMANDS)
def test_gzip_cut_off_anywhere(folder: Path, command: str):
    packed = gzip.compress(lines(*[TOKENS] * 40, *[CHAT] * 3))
    path = folder / "rows.jsonl.gz"
    for size in sorted({0, 1, 2, 3, 9, 10, 11, *range(12, len(packed), 17), len(packed) - 8, len(packed) - 1}):
        path.write_bytes(packed[:size])
        message = outcome(command, path)
        wanted = "no samples" if size == 0 else "broken or truncated"
        if size >= 2:
            assert wanted in message, f"{size} of {len(packed)} bytes: {message}"
    path.write_bytes(packed)
    assert outcome(command, path) == "read"


@FUZZ
@given(st.randoms(use_true_random=False), st.sampled_from(["jsonl", "jsonl.gz"]), st.sampled_from(COMMANDS))
def test_flipped_bytes(folder: Path, rnd: random.Random, suffix: str, command: str):
    data = bytearray(lines(TOKENS, CHAT, TOKENS))
    if suffix.endswith("gz"):
        data = bytearray(gzip.compress(bytes(data)))
    for _ in range(rnd.randrange(1, 4)):
        data[rnd.randrange(len(data))] = rnd.randrange(256)
    path = folder / f"rows.{suffix}"
    path.write_bytes(bytes(data))
    outcome(command, path)


@FUZZ
@given(st.binary(max_size=200), st.sampled_from(["jsonl", "jsonl.gz", "txt"]), st.sampled_from(COMMANDS))
def test_any_bytes(folder: Path, data: bytes, suffix: str, command: str):
    path = folder / f"rows.{suffix}"
    path.write_bytes(data)
    assert outcome(command, path) != "read"


# ---------------------------------------------------------------------------------------------------------- odd values
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)  # half surrogate pairs too
    | st.sampled_from([10**400, -1, 1e308, "assistant", "", "\ud800", "\x00", "\u2028"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def rows(draw) -> dict[str, Any]:
    """A good row with some of its fields, or fields of its messages, replaced, left out or added."""
    row: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from([TOKENS, CHAT]))))
    names = [*row, "position_ids", "advantage", "old_log_probs", "template", "messages", "input_ids"]
    for _ in range(draw(st.integers(1, 2))):
        if "messages" in row and isinstance(row["messages"], list) and draw(st.booleans()):
            message = draw(st.sampled_from(range(2)))
            if message < len(row["messages"]) and isinstance(row["messages"][message], dict):
                row["messages"][message][draw(st.sampled_from(["role", "content", "extra"]))] = draw(JSON)
        elif draw(st.booleans()):
            row[draw(st.sampled_from(names))] = draw(JSON)
        else:
            row.pop(draw(st.sampled_from(names)), None)
    return row


@FUZZ
@given(rows(), st.sampled_from(COMMANDS), st.sampled_from(["step", "trajectory"]))
def test_any_value_in_any_field(folder: Path, row: dict[str, Any], command: str, mode: str):
    path = folder / "rows.jsonl"
    path.write_bytes(lines(TOKENS, row))
    outcome(command, path, "--mode", mode)


@FUZZ
@given(JSON, st.sampled_from(COMMANDS))
def test_any_json_as_a_row(folder: Path, value: object, command: str):
    path = folder / "rows.jsonl"
    path.write_bytes(lines(value))
    assert outcome(command, path) != "read"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"[" * 200_000, "broken JSON row"),
        (b'{"a":' * 200_000, "broken JSON row"),
        (b'{"input_ids": ' + b"[" * 5000 + b"]" * 5000 + b', "loss_mask": [0]}', "broken JSON row"),
        (b'{"input_ids": [' + b"9" * 10_000 + b'], "loss_mask": [0]}', "broken JSON row"),
        (b'{"input_ids": [1e999], "loss_mask": [0]}', "input_ids[0] must be an integer"),
        (b'{"input_ids": [99999999999999999999999], "loss_mask": [0]}', "input_ids[0] must be in 0 .. 2147483647"),
        (b'{"input_ids": {}, "loss_mask": [0]}', "input_ids must be a list"),
        (b"\xef\xbb\xbf" + json.dumps(TOKENS).encode(), "broken JSON row"),
        (json.dumps(TOKENS).encode("utf-16"), "not UTF-8 text"),
        (json.dumps(CHAT).replace("hello", "\\ud83d").encode(), "half a surrogate pair"),
        (json.dumps(CHAT).replace("hello", "\\u0000 \\u202e \\u2028 \\ufeff").encode(), "read"),
        (json.dumps({**CHAT, "task": "\ud800"}).encode(), "read"),
        (json.dumps({**TOKENS, "uid": "\ud800", "session": "\x00"}).encode(), "read"),
        (json.dumps({**TOKENS, "extra": [[[[]]]] * 1000}).encode(), "read"),
    ],
)
def test_odd_rows(folder: Path, row: bytes, message: str):
    path = folder / "rows.jsonl"
    path.write_bytes(row + b"\n")
    for said in outcomes(path):
        assert message in said


@pytest.mark.parametrize("command", COMMANDS)
def test_huge_rows(folder: Path, command: str):
    """Two megabytes of text in one message; half a million tokens in one list; a line of spaces."""
    path = folder / "rows.jsonl"
    chat = json.loads(json.dumps(CHAT))
    chat["messages"][0]["content"] = "north " * 400_000
    path.write_bytes(lines(chat))
    assert outcome(command, path, *(["--max-tokens", 10**7] if command in ("analyze", "plan") else [])) == "read"
    path.write_bytes(lines({"input_ids": [7] * 500_000, "loss_mask": [0] * 499_999 + [1]}))
    assert outcome(command, path, *(["--max-tokens", 10**7] if command in ("analyze", "plan") else [])) == "read"
    path.write_bytes(b" " * 10_000_000 + b"\n")
    assert "no rows in the file" in outcome(command, path)


@pytest.mark.parametrize("command", COMMANDS)
def test_things_that_are_no_file(folder: Path, command: str):
    assert "cannot read the file" in outcome(command, folder)
    assert "cannot read the file" in outcome(command, folder / "gone.jsonl")
    assert "cannot read the file" in outcome(command, folder / ("x" * 300))


@pytest.mark.parametrize(("command", "flag"), [("analyze", "--json"), ("plan", "--trace"), ("plan", "--html")])
def test_results_that_cannot_be_written(folder: Path, command: str, flag: str):
    path = folder / "rows.jsonl"
    path.write_bytes(lines(CHAT))
    for target, message in (("x" * 300, "cannot write: File name too long"), ("no/t", "does not exist"), (".", "is a")):
        result = CliRunner().invoke(app, [command, str(path), flag, str(folder / target)])
        assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr, target
    assert [entry.name for entry in folder.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("command", ["analyze", "plan"])
def test_file_names_that_are_no_text(folder: Path, command: str):
    """The name goes into pages and tables."""
    path = folder / "r\udcff<b>\n.jsonl"
    other = json.loads(json.dumps(CHAT).replace("hello", "another prompt"))
    path.write_bytes(lines(CHAT, other))
    page = folder / "page.html"
    assert outcome(command, path, "--html", page) == "read"
    assert "<b>\n" not in page.read_text().split("</style>")[1].split("<canvas")[0]
