"""Chat traces to token samples, and the tokenizers behind it."""

import base64
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from psrl.data import load_samples, load_tokenizer
from psrl.data.chat import ChatConverter
from psrl.data.rows import Row
from psrl.data.tokenizer import IM_END, IM_START, ChatTokenizer
from psrl.errors import InputError
from tests.helpers.traces import qwen_file

START, END = 256, 257
TRACES = ("alfworld_scripted", "alfworld_tree_scripted", "webshop_react", "sweagent_demos", "textworld_scripted")


def text(value: str) -> list[int]:
    return list(value.encode())


def convert(*messages: tuple[str, str], mode: str = "step", tokenizer: ChatTokenizer | None = None, **values):
    row = {"task": "t", "trial": 3, "messages": [{"role": role, "content": content} for role, content in messages]}
    return ChatConverter(tokenizer or load_tokenizer(None), mode).convert(Row("c.jsonl:5", {**row, **values}))


CHAT = (("user", "go"), ("assistant", "left"), ("user", "wall"), ("assistant", "up"), ("user", "end"))


def test_steps():
    first, second = convert(*CHAT)
    history = [START, *text("user\n"), *text("go"), END, *text("\n"), START, *text("assistant\n")]
    assert first.input_ids_N.tolist() == [*history, *text("left"), END]
    assert first.loss_mask_N.tolist() == [False] * len(history) + [True] * 5
    assert (first.uid, first.session, first.index, first.where) == ("t", "t#3", 0, "c.jsonl:5")
    assert second.index == 1
    assert second.num_targets == 3
    prompt = second.input_ids_N[: -second.num_targets].tolist()
    assert prompt[: first.num_tokens] == first.input_ids_N.tolist()
    assert prompt[first.num_tokens :] == [
        *text("\n"), START, *text("user\n"), *text("wall"), END, *text("\n"), START, *text("assistant\n")
    ]  # fmt: skip


def test_trajectory_ends_at_the_last_response():
    (sample,) = convert(*CHAT, mode="trajectory")
    (_, last) = convert(*CHAT)
    assert sample.input_ids_N.tolist() == last.input_ids_N.tolist()
    assert sample.num_targets == len("left") + 1 + len("up") + 1
    assert sample.index == 0


def test_raw_template_is_plain_concatenation():
    first, second = convert(("user", "a:"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), template="raw")
    assert first.input_ids_N.tolist() == text("a:b")
    assert second.input_ids_N.tolist() == text("a:bcd")
    assert second.loss_mask_N.tolist() == [False, False, False, False, True]


def test_no_response_gives_no_sample():
    assert convert(("user", "hello")) == []
    assert convert(("user", "hello"), mode="trajectory") == []


def test_rows_without_samples_are_reported(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"task": "t", "trial": 0, "messages": [{"role": "user", "content": "hi"}]}\n'
        '{"task": "t", "trial": 1, "messages": [{"role": "user", "content": "hi"}, '
        '{"role": "assistant", "content": "ho"}]}\n'
    )
    loaded = load_samples([path], tokenizer=lambda: load_tokenizer("bytes"))
    assert loaded.rows_without_samples == (f"{path}:1",)
    assert [sample.where for sample in loaded.samples] == [f"{path}:2"]
    with pytest.raises(InputError, match="no samples: none of the 1 rows has an assistant message"):
        load_samples([path], tokenizer=lambda: load_tokenizer(None), limit=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": "hi"}, "messages must be a list with at least one message"),
        ({"messages": ["hi"]}, "messages[0] must be an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages[0] needs role and content, both strings"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] needs role and content, both strings"),
        (
            {"messages": [{"role": "user", "content": "ab\ud800"}]},
            "messages[0]: content has half a surrogate pair, \\ud800, at character 2",
        ),
        ({"messages": [{"role": "\udfff", "content": ""}]}, "messages[0]: role has half a surrogate pair, \\udfff"),
        ({"task": None}, "a chat row needs task (a string or an integer)"),
        ({"trial": 1.5}, "a chat row needs trial (a string or an integer)"),
        ({"template": "llama"}, "template must be one of chatml, raw, got 'llama'"),
        (
            {"template": "raw", "messages": [{"role": "assistant", "content": "x"}]},
            "the conversation begins with the assistant",
        ),
        ({"template": "raw", "messages": [{"role": "assistant", "content": ""}]}, "step 0 has no tokens"),
    ],
)
def test_bad_chat_row(values, message):
    with pytest.raises(InputError) as error:
        convert(*CHAT, **values)
    assert str(error.value).startswith("c.jsonl:5: ")
    assert message in str(error.value)


def test_vocabulary_without_chatml_tokens():
    tokenizer = ChatTokenizer("plain", lambda value: text(value), None, None)
    with pytest.raises(InputError, match=r"the tokenizer plain has no <\|im_start\|>"):
        convert(*CHAT, tokenizer=tokenizer)
    assert len(convert(*CHAT, tokenizer=tokenizer, template="raw")) == 2


# -------------------------------------------------------------------------------------------------------- tokenizers
def hf_tokenizer_folder(path: Path) -> Path:
    """A byte-pair tokenizer with ChatML tokens, trained on a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        ["you are in the middle of a room", "Action: go to the cabinet 1", "user assistant system"],
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[IM_START, IM_END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def tiktoken_file(path: Path) -> Path:
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"hell", b"hello"]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


def test_bytes():
    tokenizer = load_tokenizer(None)
    assert list(tokenizer.encode("é")) == [0xC3, 0xA9]
    assert (tokenizer.im_start_id, tokenizer.im_end_id) == (256, 257)


def test_huggingface_folder_and_file(tmp_path: Path):
    folder = hf_tokenizer_folder(tmp_path / "hf")
    for source in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(source))
        assert (tokenizer.im_start_id, tokenizer.im_end_id) == (0, 1)
        assert len(tokenizer.encode("in the middle")) < len("in the middle")


def test_tiktoken_file(tmp_path: Path):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(str(tiktoken_file(tmp_path / "small.tiktoken")))
    assert list(tokenizer.encode("hell")) == [257]
    assert (tokenizer.im_start_id, tokenizer.im_end_id) == (260, 261)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer.json"),
        ("x.tiktoken", "???? 1\n", r"x\.tiktoken:1: expected the base64 of a token and its rank"),
        ("x.tiktoken", "\n", "no tokens in the file"),
        ("x.tiktoken", "YQ== 0\n", r"x\.tiktoken: no token for the byte 0x00"),
        ("x.tiktoken", "YQ== 0\nYg== 0\n", r"x\.tiktoken:2: rank 0 is taken"),
        ("x.tiktoken", "YQ== 0\nYQ== 1\n", r"x\.tiktoken:2: the token is there already"),
        ("x.tiktoken", "YQ== -1\n", r"x\.tiktoken:1: the rank must be in 0 \.\. \d+, got -1"),
        ("x.tiktoken", "YQ== 4294967295\n", r"x\.tiktoken:1: the rank must be in 0 \.\. \d+, got 4294967295"),
        ("x.tiktoken", None, "no file"),
        ("folder", None, "no file"),
    ],
)
def test_bad_tokenizer(tmp_path: Path, name: str, content: str | None, message: str):
    pytest.importorskip("tiktoken")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(str(tmp_path / name))


# ------------------------------------------------------------------------------------------- against recorded traces
def reference(shared_dir: Path) -> ModuleType:
    """The converter that came with the traces."""
    spec = importlib.util.spec_from_file_location("to_samples", shared_dir / "traces" / "to_samples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["to_samples"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("vocabulary", ["tiktoken", "huggingface"])
def test_same_tokens_as_the_traces_own_converter(shared_dir: Path, tmp_path: Path, vocabulary: str):
    source = str(qwen_file() if vocabulary == "tiktoken" else hf_tokenizer_folder(tmp_path / "hf"))
    to_samples = reference(shared_dir)
    tokenizer, theirs = load_tokenizer(source), to_samples.load_tok(source)
    for trace in TRACES:
        path = str(shared_dir / "traces" / f"{trace}.jsonl.gz")
        for mode in ("step", "trajectory"):
            loaded = load_samples([path], tokenizer=lambda: tokenizer, mode=mode, limit=2)
            wanted = [sample for row in to_samples.rows(path, 2) for sample in to_samples.samples(row, theirs, mode)]
            assert len(loaded.samples) == len(wanted) > 0
            for got, want in zip(loaded.samples, wanted, strict=True):
                assert got.input_ids_N.tolist() == want["input_ids"]
                assert got.loss_mask_N.tolist() == [bool(x) for x in want["loss_mask"]]
                assert (got.uid, got.session, got.index) == (want["uid"], want["session"], want["index"])
