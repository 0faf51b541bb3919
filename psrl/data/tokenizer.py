"""Tokenizers for chat traces: a Hugging Face ``tokenizer.json``, a ``*.tiktoken`` vocabulary, or plain bytes.

The libraries behind them are imported when one is loaded.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from psrl.errors import InputError

BYTES = "bytes"
"""Name of the built-in tokenizer: ids 0 .. 255 are the bytes of the UTF-8 text, 256 and 257 the two ChatML tokens."""

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

# How Qwen splits text before merging (Qwen2Tokenizer, the pattern of its tokenizer.json).
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The special tokens follow the merges, in Qwen's order.
_QWEN_SPECIALS = ("<|endoftext|>", IM_START, IM_END)

_MAX_RANK = (1 << 31) - 1 - len(_QWEN_SPECIALS)
"""So that the special tokens after it are token ids too."""


@dataclass(frozen=True)
class ChatTokenizer:
    """Text to ids, and the ids of the two tokens that frame a ChatML message (None where the vocabulary has none)."""

    name: str
    encode: Callable[[str], Sequence[int]]
    """Ids of a text; markup of special tokens inside it is ordinary text where the library allows that."""
    im_start_id: int | None
    im_end_id: int | None


def load_tokenizer(source: str | None) -> ChatTokenizer:
    """Load a tokenizer.

    Args:
        source: a folder with ``tokenizer.json``, that file itself, a ``*.tiktoken`` file, or ``bytes`` or None for the
            built-in byte tokenizer.

    Raises:
        InputError: nothing is there, the file is broken, or the library to read it is not installed.
    """
    if source is None or source == BYTES:
        return ChatTokenizer(BYTES, lambda text: list(text.encode("utf-8")), 256, 257)
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"--tokenizer {source}: no file {path}: expected tokenizer.json, a *.tiktoken file or 'bytes'")
    return _load_tiktoken(path) if path.suffix == ".tiktoken" else _load_huggingface(path)


def load_model_tokenizer(folder: str | None, note: Callable[[str], None]) -> ChatTokenizer:
    """The tokenizer of a model folder where it can write ChatML, else bytes, which ``note`` is told.

    Args:
        folder: None for a model without a folder, which has no tokenizer.

    Raises:
        InputError: as ``load_tokenizer``.
    """
    if folder is None:
        return load_tokenizer(None)
    if (Path(folder) / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        if tokenizer.im_start_id is not None and tokenizer.im_end_id is not None:
            return tokenizer
    note(
        f"chat rows are tokenised as bytes: {folder} has no tokenizer.json with ChatML tokens; name another with "
        "--tokenizer"
    )
    return load_tokenizer(None)


def _load_huggingface(path: Path) -> ChatTokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(f"{path} needs the package tokenizers: pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any broken file
        raise InputError(f"{path}: not a tokenizer.json: {_one_line(error)}") from error
    return ChatTokenizer(
        name=str(path),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        im_start_id=tokenizer.token_to_id(IM_START),
        im_end_id=tokenizer.token_to_id(IM_END),
    )


def _load_tiktoken(path: Path) -> ChatTokenizer:
    try:
        import tiktoken
    except ImportError as error:
        raise InputError(f"{path} needs the package tiktoken: pip install tiktoken") from error
    ranks = _read_ranks(path)
    first = max(ranks.values()) + 1
    specials = {token: first + i for i, token in enumerate(_QWEN_SPECIALS)}
    try:
        encoding = tiktoken.Encoding(path.stem, pat_str=_QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise InputError(f"{path}: not a usable vocabulary: {_one_line(error)}") from error
    return ChatTokenizer(
        name=str(path),
        encode=lambda text: encoding.encode(text, disallowed_special=()),
        im_start_id=specials[IM_START],
        im_end_id=specials[IM_END],
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank: a line holds the base64 of the bytes and the rank."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{path}:{number}: expected the base64 of a token and its rank") from error
        if not 0 <= rank <= _MAX_RANK:
            raise InputError(f"{path}:{number}: the rank must be in 0 .. {_MAX_RANK}, got {rank}")
        if token in ranks:
            raise InputError(f"{path}:{number}: the token is there already, with rank {ranks[token]}")
        if rank in taken:
            raise InputError(f"{path}:{number}: rank {rank} is taken")
        ranks[token] = rank
        taken.add(rank)
    if not ranks:
        raise InputError(f"{path}: no tokens in the file")
    for value in range(256):
        if bytes([value]) not in ranks:
            raise InputError(f"{path}: no token for the byte 0x{value:02x}: some texts would have no ids")
    return ranks


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
