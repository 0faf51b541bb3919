"""Token-sample rows: what is read, and every way a row or file can be wrong."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from psrl.data import load_samples, load_tokenizer
from psrl.data.rows import Row, read_rows
from psrl.data.samples import check_vocabulary, parse_sample
from psrl.errors import InputError

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}


def parse(**values):
    return parse_sample(Row("s.jsonl:3", {**GOOD, **values}))


def load(*paths: Path, **kwargs):
    return load_samples(paths, tokenizer=lambda: load_tokenizer(None), **kwargs)


def write(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_defaults():
    sample = parse()
    assert sample.where == "s.jsonl:3"
    assert sample.input_ids_N.tolist() == [5, 6, 7, 8]
    assert sample.loss_mask_N.tolist() == [False, True, False, True]
    assert sample.position_ids_N.tolist() == [0, 1, 2, 3]
    assert sample.has_default_positions
    assert sample.advantages_M.tolist() == [1.0, 1.0]
    assert sample.old_log_probs_M is None
    assert (sample.uid, sample.session, sample.index) == ("", "", 0)


def test_every_field():
    sample = parse(
        uid="task", session=7, index=2, position_ids=[0, 1, 5, 6], advantage=[0.5, -2], old_log_probs=[-1.5, -0.25]
    )
    assert (sample.uid, sample.session, sample.index) == ("task", "7", 2)
    assert sample.position_ids_N.tolist() == [0, 1, 5, 6]
    assert not sample.has_default_positions
    assert sample.advantages_M.tolist() == [0.5, -2.0]
    assert sample.old_log_probs_M is not None
    assert sample.old_log_probs_M.tolist() == [-1.5, -0.25]


def test_one_number_is_every_targets_advantage():
    assert parse(advantage=-3).advantages_M.tolist() == [-3.0, -3.0]


def test_null_is_as_good_as_absent():
    absent = dict.fromkeys(("uid", "session", "index", "position_ids", "advantage", "old_log_probs"))
    assert parse(**absent).advantages_M.tolist() == [1.0, 1.0]


def test_unknown_keys_are_left_alone():
    assert parse(reward=float("nan"), logprobs="?").num_targets == 2


def test_one_token_is_a_sample_without_target():
    sample = parse_sample(Row("s.jsonl:1", {"input_ids": [3], "loss_mask": [0]}))
    assert (sample.num_tokens, sample.num_targets) == (1, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": 5}, "input_ids must be a list, got 5"),
        ({"input_ids": "1 2"}, "input_ids must be a list, got '1 2'"),
        ({"input_ids": None}, "input_ids must be a list, got null"),
        ({"input_ids": [1, True, 2, 3]}, "input_ids[1] must be an integer, got true"),
        ({"input_ids": [1, 2, 3.0, 4]}, "input_ids[2] must be an integer, got 3.0"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids[0] must be an integer, got a list"),
        ({"input_ids": [1, None, 3, 4]}, "input_ids[1] must be an integer, got null"),
        ({"input_ids": [1, -2, 3, 4]}, "input_ids[1] must be in 0 .. 2147483647, got -2"),
        ({"input_ids": [1, 2, 3, 10**30]}, "got an integer of more than 20 digits"),
        ({"input_ids": [1, 2, 3]}, "loss_mask has 4 entries, but input_ids has 3"),
        ({"loss_mask": [1, 1, 1, 1]}, "the first loss_mask entry is 1"),
        ({"loss_mask": [0, 2, 0, 0]}, "loss_mask[1] must be in 0 .. 1, got 2"),
        ({"loss_mask": [0, True, 0, 0]}, "loss_mask[1] must be an integer, got true"),
        ({"loss_mask": [0, 0.5, 0, 0]}, "loss_mask[1] must be an integer, got 0.5"),
        ({"position_ids": [0, 1, 2]}, "position_ids has 3 entries, but input_ids has 4"),
        ({"position_ids": [0, 1, -1, 3]}, "position_ids[2] must be in 0 .."),
        ({"advantage": float("nan")}, "advantage must be a finite float32 number, got NaN"),
        ({"advantage": [1.0, float("inf")]}, "advantage[1] must be a finite float32 number, got inf"),
        ({"advantage": 10**400}, "advantage must be a finite float32 number"),
        ({"advantage": 1e300}, "advantage must be a finite float32 number, got 1e+300"),
        ({"advantage": "1"}, "advantage must be a number, got '1'"),
        ({"advantage": True}, "advantage must be a number, got true"),
        ({"advantage": [1.0, 1.0, 1.0]}, "advantage has 3 entries, but the sample has 2 targets"),
        ({"advantage": []}, "advantage has 0 entries, but the sample has 2 targets"),
        ({"old_log_probs": [-1.0]}, "old_log_probs has 1 entries, but the sample has 2 targets"),
        ({"old_log_probs": -1.0}, "old_log_probs must be a list, got -1.0"),
        ({"old_log_probs": [-1.0, float("-inf")]}, "old_log_probs[1] must be a finite float32 number"),
        ({"old_log_probs": [-1.0, float("nan")]}, "old_log_probs[1] must be a finite float32 number, got NaN"),
        ({"uid": 1.5}, "uid must be a string or an integer, got 1.5"),
        ({"session": ["a"]}, "session must be a string or an integer, got a list"),
        ({"index": -1}, "index must be a non-negative integer, got -1"),
        ({"index": True}, "index must be a non-negative integer, got true"),
    ],
)
def test_bad_field(values, message):
    with pytest.raises(InputError) as error:
        parse(**values)
    assert str(error.value).startswith("s.jsonl:3: ")
    assert message in str(error.value)


def test_a_field_is_missing(tmp_path: Path):
    with pytest.raises(InputError, match=r"s\.jsonl:1: the row has no loss_mask"):
        load(write(tmp_path / "s.jsonl", {"input_ids": [1, 2]}))


def test_vocabulary():
    samples = [parse(), parse(input_ids=[1, 2, 512, 4])]
    check_vocabulary(samples, 513, "M")
    with pytest.raises(InputError) as error:
        check_vocabulary(samples, 512, "M")
    assert str(error.value) == "s.jsonl:3: token id 512 (token 2) is outside the vocabulary: M has 512 ids"


# ------------------------------------------------------------------------------------------------------------- files
def test_files_in_order_with_blank_lines_and_gzip(tmp_path: Path):
    plain = write(tmp_path / "a.jsonl", GOOD, "", {**GOOD, "uid": "second"})
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({**GOOD, "uid": "third"}).encode()))
    loaded = load(plain, packed)
    assert [sample.where for sample in loaded.samples] == [f"{plain}:1", f"{plain}:3", f"{packed}:1"]
    assert [sample.uid for sample in loaded.samples] == ["", "second", "third"]
    assert loaded.num_rows == 3


def test_compression_is_told_by_content(tmp_path: Path):
    path = tmp_path / "samples"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(load(path).samples) == 1


def test_limit_counts_rows_over_all_files_and_leaves_later_ones_unread(tmp_path: Path):
    first, second = write(tmp_path / "a.jsonl", GOOD, GOOD), write(tmp_path / "b.jsonl", GOOD, "broken")
    assert len(load(first, second, limit=3).samples) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_ids": [1, 2', "broken JSON row: Expecting ',' delimiter (column 20)"),
        ("[1, 2]", "a row must be a JSON object, got list"),
        ("null", "a row must be a JSON object, got NoneType"),
        ("[" * 100_000, "broken JSON row"),
        ('{"text": "hello"}', "the row has neither input_ids (a token sample) nor messages (a chat)"),
    ],
)
def test_broken_row_names_file_and_line(tmp_path: Path, line: str, message: str):
    path = write(tmp_path / "s.jsonl", GOOD, line)
    with pytest.raises(InputError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)


def test_not_utf8(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"uid": "\xff"}\n')
    with pytest.raises(InputError, match=r"s\.jsonl:2: not UTF-8 text"):
        load(path)


def test_truncated_gzip(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = "".join(json.dumps({"input_ids": rng.integers(0, 9999, 50).tolist(), "loss_mask": [0] * 50}) + "\n"
                   for _ in range(200))  # fmt: skip
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(gzip.compress(rows.encode())[:-2000])
    with pytest.raises(InputError, match=r"s\.jsonl\.gz:\d+: the gzip stream is broken or truncated"):
        load(path)


def test_not_gzip_at_all(tmp_path: Path):
    path = write(tmp_path / "s.jsonl.gz", GOOD)
    with pytest.raises(InputError, match="the gzip stream is broken"):
        load(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_rows(tmp_path: Path, content: str):
    path = tmp_path / "s.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"s\.jsonl: no samples: no rows in the file"):
        load(path)


def test_missing_file_and_folder(tmp_path: Path):
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot read the file: No such file or directory"):
        list(read_rows(tmp_path / "gone.jsonl"))
    with pytest.raises(InputError, match="cannot read the file: Is a directory"):
        list(read_rows(tmp_path))
