"""Samples of conversations under every strategy."""

import gzip
import json
from pathlib import Path

import pytest

from psrl.agents.strategies import STRATEGIES
from psrl.bench.job import read_cases
from psrl.bench.options import BenchOptions
from psrl.bench.traces import made_up_samples, read_trace, samples_of
from psrl.data.tokenizer import load_tokenizer
from psrl.errors import ConfigError, InputError


def write(path: Path, rows: list[dict]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def raw_row(*answers: str, **more) -> dict:
    """Each answer follows an observation; the template adds nothing, so that a sample is the text it was."""
    messages = [{"role": "user", "content": "GO"}]
    for number, answer in enumerate(answers, start=1):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"<o{number}>"}]
    return {"task": "t", "trial": 0, "template": "raw", "messages": messages, **more}


def texts(path: Path, strategy: str, window: int = 1) -> list[tuple[str, str]]:
    """Each sample's prompt and what it is trained on."""
    trace = read_trace(path, load_tokenizer("bytes"), None, None)
    return [
        (
            bytes(s.input_ids_N[: int(s.loss_mask_N.argmax())].tolist()).decode(),
            bytes(s.input_ids_N[s.loss_mask_N].tolist()).decode(),
        )
        for s in samples_of(trace, strategy, window)
    ]


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return write(tmp_path / "chain.jsonl.gz", [raw_row("hm Action: a", "Action: b", "c")])


def test_linear(chain):
    assert texts(chain, "linear") == [("GO", "hm Action: aAction: bc")]


def test_step(chain):
    assert texts(chain, "step") == [
        ("GO", "hm Action: a"),
        ("GOhm Action: a<o1>", "Action: b"),
        ("GOhm Action: a<o1>Action: b<o2>", "c"),
    ]


def test_step_window(chain):
    assert texts(chain, "step_window")[2] == ("GO<o1>Action: b<o2>", "c")


def test_step_no_think(chain):
    """What precedes the action leaves the history, not the answer."""
    assert texts(chain, "step_no_think") == [
        ("GO", "hm Action: a"),
        ("GOAction: a<o1>", "Action: b"),
        ("GOAction: a<o1>Action: b<o2>", "c"),
    ]


def test_rows_that_branch_off_each_other_are_one_tree(tmp_path):
    rows = [raw_row("a", "b", parent=None, branch_turn=0), raw_row("a", "x", parent=0, branch_turn=1)]
    path = write(tmp_path / "tree.jsonl.gz", rows)
    assert texts(path, "tree") == [("GO", "ab"), ("GO", "ax")]
    assert texts(path, "tree_step") == [("GO", "a"), ("GOa<o1>", "b"), ("GOa<o1>", "x")]


def test_chatml_boundaries_are_in_the_history(tmp_path):
    row = {**raw_row("a", "b"), "template": "chatml"}
    trace = read_trace(write(tmp_path / "chat.jsonl.gz", [row]), load_tokenizer("bytes"), None, None)
    first, second = samples_of(trace, "step", 1)
    num_shared = len(first.input_ids_N)
    assert second.input_ids_N[:num_shared].tolist() == first.input_ids_N.tolist()
    assert second.input_ids_N[num_shared : num_shared + 1].tobytes()[:1] == b"\n"


def test_strategies_that_do_not_fit_are_left_out(chain, tmp_path):
    assert [strategy for _, strategy in read_cases(BenchOptions((chain,), tmp_path))] == list(STRATEGIES[:4])
    with pytest.raises(ConfigError, match="none of the strategies tree fits"):
        read_cases(BenchOptions((chain,), tmp_path, strategies=("tree",)))


def test_turns_and_rows_are_limited(chain, tmp_path):
    cases = read_cases(BenchOptions((chain,), tmp_path, strategies=("step",), turns=2))
    assert [len(samples) for samples in cases.values()] == [2]


def test_token_samples_are_refused(tmp_path):
    path = write(tmp_path / "tokens.jsonl.gz", [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    with pytest.raises(InputError, match="strategies need conversations"):
        read_cases(BenchOptions((path,), tmp_path))


def test_options_that_contradict(tmp_path):
    with pytest.raises(ConfigError, match="--system needs unshared and psrl"):
        BenchOptions((tmp_path,), tmp_path, systems=("psrl",))
    with pytest.raises(ConfigError, match=r"--strategy must be one of linear, .* got 'all'"):
        BenchOptions((tmp_path,), tmp_path, strategies=("all",))


def test_made_up_samples_grow_by_the_factor():
    lengths = {factor: [s.num_tokens for s in made_up_samples(factor, 0)] for factor in (1, 4)}
    assert lengths[1][:3] == [72, 104, 136] and lengths[4][:3] == [288, 416, 544]
    assert len(lengths[1]) == 12
