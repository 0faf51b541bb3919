"""Token ids back to text, for showing people where samples differ."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from psrl.data.tokenizer import BYTES, IM_END, IM_START, load_tokenizer

Decode = Callable[[Sequence[int]], str]
"""Text of some ids; what is no text becomes U+FFFD."""

_BYTE_TOKENS = {256: IM_START.encode(), 257: IM_END.encode()}


def load_decoder(source: str | None) -> Decode:
    """The inverse of ``load_tokenizer(source)``.

    Raises:
        InputError: as ``load_tokenizer``.
    """
    tokenizer = load_tokenizer(source)  # checks the file
    if source is None or source == BYTES:
        return _decode_bytes
    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix != ".tiktoken":
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(path))
        size = library.get_vocab_size(with_added_tokens=True)
        return lambda ids: _known_only(ids, size, lambda known: library.decode(known, skip_special_tokens=False))
    pieces = {int(rank): base64.b64decode(token) for token, rank in map(bytes.split, _lines(path))}
    for token, token_id in ((IM_START, tokenizer.im_start_id), (IM_END, tokenizer.im_end_id)):
        if token_id is not None:
            pieces[token_id] = token.encode()
    return lambda ids: b"".join(pieces.get(i, b"\xff") for i in ids).decode("utf-8", errors="replace")


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.strip()]


def _decode_bytes(ids: Sequence[int]) -> str:
    pieces = (bytes([i]) if i < 256 else _BYTE_TOKENS.get(i, b"\xff") for i in ids)
    return b"".join(pieces).decode("utf-8", errors="replace")


def _known_only(ids: Sequence[int], size: int, decode: Callable[[list[int]], str]) -> str:
    """Ids beyond the vocabulary have no text."""
    known = [i for i in ids if i < size]
    return decode(known) + "\N{REPLACEMENT CHARACTER}" * (len(ids) - len(known))


def printable(text: str, limit: int, *, keep_end: bool = False) -> str:
    """One line of at most ``limit`` characters and an ellipsis; control characters are escaped after that."""
    if len(text) > limit:
        text = "…" + text[len(text) - limit + 1 :] if keep_end else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
