"""The documentation as tests read it: links, headings and code spans of Markdown files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "patches/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
_MARKDOWN = MarkdownIt("commonmark").enable("table")


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def render(page: Path) -> str:
    """As HTML, by the rules that GitHub follows."""
    return _MARKDOWN.render(page.read_text())


def inline_tokens(page: Path) -> Iterator[Token]:
    for block in _MARKDOWN.parse(page.read_text()):
        yield from block.children or ()


def links(page: Path) -> list[str]:
    """Targets of links and images."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in inline_tokens(page)]
    return [str(target) for target in found if target]


def code_spans(page: Path) -> list[str]:
    return [token.content for token in inline_tokens(page) if token.type == "code_inline"]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them; without those of headings that occur twice, which get numbers."""
    found: Counter[str] = Counter()
    for heading, inline in pairwise(_MARKDOWN.parse(page.read_text())):
        if heading.type == "heading_open":
            text = "".join(token.content for token in inline.children or ())
            found[re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")] += 1
    return {anchor for anchor, times in found.items() if times == 1}
