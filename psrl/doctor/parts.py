"""Rollouts, environments and tools that a job may use."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from psrl.doctor.finding import Finding, State


class _Part(NamedTuple):
    section: str
    name: str
    module: str | None
    """None: part of psrl."""
    what: str
    fix: str


_PARTS = (
    _Part("rollout", "hf", None, "embedded, for small models and tests", ""),
    _Part("rollout", "vllm", "vllm", "veRL's own", "pip install 'psrl[vllm]'"),
    _Part("rollout", "sglang", "sglang", "veRL's own", "pip install 'psrl[sglang]'"),
    _Part("environments", "textworld", "textworld", "text games made locally", "pip install 'psrl[textworld]'"),
    _Part("environments", "alfworld", "fast_downward", "games of ALFWorld", "pip install 'psrl[alfworld]'"),
    _Part("environments", "search", "bm25s", "questions over a local index", "pip install 'psrl[search]'"),
    _Part("environments", "webshop", None, "client of a WebShop server", ""),
)


def check_parts() -> Iterator[Finding]:
    for part in _PARTS:
        if part.module is None or importlib.util.find_spec(part.module) is not None:
            yield Finding(part.section, part.name, State.OK, part.what)
        else:
            yield Finding(part.section, part.name, State.ABSENT, f"{part.what}; no module {part.module}", part.fix)
    compiler = shutil.which("cc")
    if compiler is None:
        yield Finding(
            "tools",
            "cc",
            State.ABSENT,
            "Triton and TextWorld compile with it",
            "install a C compiler",
        )
    else:
        yield Finding("tools", "cc", State.OK, compiler)
