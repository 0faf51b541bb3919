"""What breaks sharing: places where samples of one trajectory or prompt part although nothing was sampled there.

At a fork of the prefix tree whose branches begin with targets the policy chose differently: that is sampling, and
nothing is lost. Where a branch begins with a token that no sample trains, the context was written differently: a
history tokenised again, a timestamp, a history whose beginning was cut off, thoughts that were removed. Everything
after such a place is computed again, though much of it may be the same.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from psrl.analyze.radix import RadixTree
from psrl.analyze.streams import tokens_of
from psrl.analyze.text import Decode, printable
from psrl.types import BoolArray, IntArray

RETOKENISED = "re-tokenised turn"
TIMESTAMP = "timestamp or id in the context"
TRUNCATED = "left-truncated history"
REMOVED = "response removed from the history"
INSERTED = "text inserted into the history"
EDITED = "short edit of the context"
REWRITTEN = "different context"

_EDIT, _MATCH, _FEWEST = 64, 8, 4
"""Longest replaced run that is looked for, tokens that must agree after it, and the fewest that are evidence."""
_BEFORE, _AFTER, _CHARACTERS = 24, 64, 120
_CHANGES_EACH_TIME = re.compile(
    r"\d{1,4}[-/.:]\d{1,2}([-/.:]\d{1,4})?|\d{9,}|[0-9a-fA-F]{8,}|"
    r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b"
)


@dataclass(frozen=True, slots=True)
class Break:
    """Two branches that part at one place. All counts are tokens."""

    kind: str
    scope: str
    """``trajectory``, ``group`` or ``batch``: the least that the branches have in common."""
    prefix: int
    """Shared before the place."""
    lost: int
    """Of the branch that shares less, after the place: an upper bound of what sharing lost here."""
    places: tuple[str, str]
    """``file:line (step i)`` of a sample of each branch."""
    before: str
    """Last shared text, or ids."""
    texts: tuple[str, str]
    """How each branch goes on."""


class _Branch(NamedTuple):
    child: int
    leaf: int
    """A deepest node below it."""
    length: int
    """Tokens from the fork to the end of ``leaf``."""


@dataclass(frozen=True, slots=True)
class BreakSummary:
    """All breaks of a batch."""

    sampled_forks: int
    """Branches that part where the policy chose."""
    by_kind: dict[tuple[str, str], tuple[int, int]]
    """(scope, kind) to number of breaks and their lost tokens."""
    worst: tuple[Break, ...]
    """Those that lost most, of every kind and scope; most lost tokens first."""


def find_breaks(tree: RadixTree, decode: Decode | None, most: int = 12) -> BreakSummary:
    """Find and classify every break.

    Args:
        decode: ids to text. Without it, re-tokenised turns and timestamps are seen as short edits, and ids are shown.
    """
    finder = _Finder(tree, decode)
    seen: set[tuple[int, int]] = set()
    found: list[Break] = []
    sampled = 0
    for scope, labels in (
        ("trajectory", tree.samples.session),
        ("group", tree.samples.uid),
        ("batch", [None] * len(tree.samples.uid)),
    ):
        for node, children in _forks(tree, labels):
            branches = sorted((finder.branch(child) for child in children), key=lambda b: -b.length)
            for branch in branches[1:]:
                if (node, branch.child) in seen:
                    continue
                seen.add((node, branch.child))
                if finder.is_sampled(branches[0], branch):
                    sampled += 1
                    continue
                result = finder.classify(scope, node, branches[0], branch)
                # Different prompts differ; only what changes by accident is worth a word.
                if scope != "batch" or result.kind in (RETOKENISED, TIMESTAMP):
                    found.append(result)
    by_kind: dict[tuple[str, str], tuple[int, int]] = {}
    for b in found:
        count, lost = by_kind.get((b.scope, b.kind), (0, 0))
        by_kind[b.scope, b.kind] = count + 1, lost + b.lost
    return BreakSummary(sampled, by_kind, _worst(found, most))


def _worst(found: Sequence[Break], most: int) -> tuple[Break, ...]:
    turn: dict[tuple[str, str], int] = {}  # so that no kind is crowded out by another
    keyed: list[tuple[int, int, Break]] = []
    for b in sorted(found, key=lambda b: -b.lost):
        nth = turn[b.scope, b.kind] = turn.get((b.scope, b.kind), -1) + 1
        keyed.append((nth, -b.lost, b))
    keyed.sort(key=lambda item: item[:2])
    return tuple(sorted((b for *_, b in keyed[:most]), key=lambda b: -b.lost))


def _forks(tree: RadixTree, labels: Sequence[Hashable]) -> Iterator[tuple[int, list[int]]]:
    """Per label, the nodes (-1: before the first token) below which its samples part, with the children they take."""
    members: dict[Hashable, set[int]] = {}
    for sample, label in enumerate(labels):
        members.setdefault(label, set()).add(tree.samples.node[sample])
    for ends in members.values():
        if len(ends) < 2:
            continue
        children: dict[int, list[int]] = {}
        seen: set[int] = set()
        for end in sorted(ends):
            node = end
            while node >= 0 and node not in seen:
                seen.add(node)
                children.setdefault(tree.parent[node], []).append(node)
                node = tree.parent[node]
        yield from ((node, below) for node, below in children.items() if len(below) > 1)


class _Finder:
    """Compares branches of one tree."""

    def __init__(self, tree: RadixTree, decode: Decode | None) -> None:
        self._tree = tree
        self._decode = decode
        self._sample_at: dict[int, int] = {}
        for sample, node in enumerate(tree.samples.node):
            self._sample_at.setdefault(node, sample)
        self._deepest = _deepest(tree)

    def branch(self, child: int) -> _Branch:
        return _Branch(child, *self._deepest[child])

    def is_sampled(self, a: _Branch, b: _Branch) -> bool:
        return bool(self._tree.targets[a.child][0] and self._tree.targets[b.child][0])

    def classify(self, scope: str, node: int, a: _Branch, b: _Branch) -> Break:
        ids_a, targets_a = self._continuation(node, a)
        ids_b, targets_b = self._continuation(node, b)
        shared = tokens_of(self._tree.path_keys(node)) if node >= 0 else np.empty(0, dtype=np.int64)
        kind = self._kind(shared, ids_a, targets_a, ids_b, targets_b)
        if scope != "trajectory" and kind in (TRUNCATED, INSERTED):
            kind = REWRITTEN  # there is no common history
        return Break(
            kind=kind,
            scope=scope,
            prefix=len(shared),
            lost=b.length,
            places=(self._place(a), self._place(b)),
            before=self._show(shared[-_BEFORE:], keep_end=True),
            texts=(self._show(ids_a[:_AFTER]), self._show(ids_b[:_AFTER])),
        )

    def _continuation(self, node: int, branch: _Branch) -> tuple[IntArray, BoolArray]:
        """Ids and targets from the fork to the end of the branch."""
        path: list[int] = []
        at = branch.leaf
        while at != node:
            path.append(at)
            at = self._tree.parent[at]
        path.reverse()
        keys = np.concatenate([self._tree.keys[n] for n in path])
        return tokens_of(keys), np.concatenate([self._tree.targets[n] for n in path])

    def _kind(self, shared: IntArray, a: IntArray, targets_a: BoolArray, b: IntArray, targets_b: BoolArray) -> str:
        removed = _cut_out(a, b)
        if removed:
            return REMOVED if targets_a[:removed].mean() > 0.5 else TRUNCATED
        removed = _cut_out(b, a)
        if removed:
            if targets_b[:removed].mean() > 0.5:
                return REMOVED
            return TRUNCATED if removed >= _MATCH * 2 else INSERTED
        replaced = _realign(a, b)
        if replaced is None:
            return RETOKENISED if self._same_text(shared, a, b) else REWRITTEN
        i, j = replaced
        if not (i and j) and (targets_a[:i].mean() if i else targets_b[:j].mean()) > 0.5:
            return REMOVED
        if self._decode is None:
            return EDITED
        context = shared[-_BEFORE:].tolist()
        text_a, text_b = (self._decode([*context, *ids.tolist()]) for ids in (a[:i], b[:j]))
        if text_a == text_b:
            return RETOKENISED
        around = [self._decode([*context, *ids.tolist()]) for ids in (a[: i + _BEFORE], b[: j + _BEFORE])]
        return TIMESTAMP if _only_marks_differ(*around) else EDITED

    def _same_text(self, shared: IntArray, a: IntArray, b: IntArray) -> bool:
        """Whether all of ``b``, if it is short, says what the first tokens of ``a`` say: it ends with a response."""
        if self._decode is None or len(b) > _EDIT:
            return False
        context = shared[-_BEFORE:].tolist()
        text = self._decode([*context, *b.tolist()])
        return any(self._decode([*context, *a[:end].tolist()]) == text for end in range(1, min(len(a), 2 * _EDIT) + 1))

    def _place(self, branch: _Branch) -> str:
        sample = self._sample_at[branch.leaf]
        samples = self._tree.samples
        return f"{samples.where[sample]} (step {samples.index[sample]})"

    def _show(self, ids: IntArray, *, keep_end: bool = False) -> str:
        if self._decode is None:
            return " ".join(map(str, ids[-8:].tolist() if keep_end else ids[:8].tolist()))
        return printable(self._decode(ids.tolist()), _CHARACTERS, keep_end=keep_end)


def _deepest(tree: RadixTree) -> list[tuple[int, int]]:
    """Per node, a deepest node below it and the tokens down to its end, its own included."""
    best = [(node, len(keys)) for node, keys in enumerate(tree.keys)]
    order: list[int] = []
    children: dict[int, list[int]] = {}
    for node, above in enumerate(tree.parent):
        children.setdefault(above, []).append(node)
    stack = list(children.get(-1, ()))
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, ())
    for node in reversed(order):
        above = tree.parent[node]
        if above >= 0 and best[node][1] + len(tree.keys[above]) > best[above][1]:
            best[above] = best[node][0], best[node][1] + len(tree.keys[above])
    return best


def _cut_out(a: IntArray, b: IntArray) -> int:
    """Tokens to remove from the front of ``a`` so that it goes on as ``b`` does; 0 where there are none."""
    width = min(2 * _MATCH, len(b))
    if width < _FEWEST or len(a) <= width:
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(a, width)
    candidates = np.flatnonzero((windows[1:, :_FEWEST] == b[:_FEWEST]).all(axis=1)) + 1
    same = candidates[(windows[candidates] == b[:width]).all(axis=1)]
    return int(same[0]) if len(same) else 0


def _realign(a: IntArray, b: IntArray) -> tuple[int, int] | None:
    """Shortest runs to drop from both so that they agree again: (from a, from b)."""
    shortest = min(len(a), len(b))
    # Four equal tokens are evidence only where there are few: in bytes, any two texts have some.
    for width in (_MATCH, _FEWEST) if shortest < 2 * _MATCH else (_MATCH,):
        if shortest <= width:
            continue
        rows, columns = (np.lib.stride_tricks.sliding_window_view(x[: _EDIT + width], width) for x in (a, b))
        agree = (rows[:, None] == columns[None]).all(axis=2)
        if agree.any():
            cost = np.add.outer(np.arange(len(rows)), np.arange(len(columns)))
            i, j = divmod(int(np.where(agree, cost, 2 * _EDIT + 2).argmin()), len(columns))
            return i, j
    return None


def _only_marks_differ(a: str, b: str) -> bool:
    """Whether two texts are the same but for dates, times, counters and ids."""
    return a != b and _CHANGES_EACH_TIME.sub("#", a) == _CHANGES_EACH_TIME.sub("#", b)
