#!/usr/bin/env python3
"""The pictures of docs/concepts.md, drawn from a real tree and a real plan of a few made-up samples.

    python scripts/concept_pictures.py            # write docs/img/{tree,plan,passes,mask}.svg anew
    python scripts/concept_pictures.py --check    # exit 1 where one differs

Shape legend: T local tokens, P path tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from psrl.cost import KVFootprint, ModelShape
from psrl.plan_view.picture import tree_runs
from psrl.plan_view.timeline import make_timeline
from psrl.planner import build_plan
from psrl.tree import PrefixTree, build_tree
from psrl.types import ExecutionPlan, MicroBatch, SampleBatch

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img"
BUDGET = 6
PARTS = {"system": 5, "turn 1 a": 3, "turn 1 b": 2, "turn 2 a": 2, "turn 2 b": 4, "turn 3": 4}
"""Tokens of every part."""
SAMPLES = (
    ("system", "turn 1 a"),
    ("system", "turn 1 a", "turn 2 a"),
    ("system", "turn 1 a", "turn 2 a", "turn 3"),
    ("system", "turn 1 a", "turn 2 b"),
    ("system", "turn 1 b"),
)
LEAVES = ("turn 3", "turn 2 b", "turn 1 b")
"""Parts that end a branch, in preorder."""
CELL, ROW = 30, 34
COLORS = ("#1e3a5f", "#3f6ea3", "#f2b880", "#8fc1a9", "#d9a5c7")
PART_COLOR, INK, SOFT = "#dbe4ee", "#1f2937", "#6b7280"


@dataclass
class Drawing:
    """An SVG picture on white ground; coordinates are pixels from the upper left corner."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list[str])

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "#ffffff") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(self, x: float, y: float, text: str, fill: str = INK, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str) -> None:
        """A rectangle with a text in its middle."""
        self.rect(x, y, width, height, fill)
        dark = fill in COLORS[:2]
        self.text(x + width / 2, y + height / 2 + 4.5, text, "#ffffff" if dark else INK)

    def svg(self) -> str:
        inner = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" font-size="13" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{inner}\n</svg>\n'
        )


def make_plan() -> tuple[PrefixTree, ExecutionPlan]:
    """Each part has tokens of its own, so samples share exactly the parts that their names say."""
    starts, token = dict[str, int](), 0
    for name, size in PARTS.items():
        starts[name], token = token, token + size
    ids = [[starts[name] + i for name in sample for i in range(PARTS[name])] for sample in SAMPLES]
    masks = [[0, *[1] * (len(row) - 1)] for row in ids]
    batch = SampleBatch.from_lists(ids, masks)
    tree = build_tree(batch)
    return tree, build_plan(batch, max_tokens=BUDGET, shape=SHAPE, footprint=FOOTPRINT, tree=tree)


SHAPE = ModelShape(num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=16, output_size=16)
FOOTPRINT = KVFootprint(kv_bytes_per_token=1, grad_bytes_per_token=1)
"""Bytes are tokens here."""


def kind(micro_batch: MicroBatch) -> str:
    return f"{'spine' if micro_batch.is_spine else 'leaf'} {micro_batch.index}"


def part_of(token_id: int) -> str:
    for name, size in PARTS.items():
        if token_id < size:
            return name
        token_id -= size
    raise ValueError("no such token")


# ------------------------------------------------------------------------------------------------------- the pictures
def draw_tree() -> Drawing:
    """The samples above, what is left of them below."""
    width = 90 + CELL * max(sum(PARTS[name] for name in sample) for sample in SAMPLES) + 20
    drawing = Drawing(width, 2 * 24 + ROW * (len(SAMPLES) + len(LEAVES)) + 30, "Samples, and their prefix tree")
    tokens = sum(PARTS[name] for sample in SAMPLES for name in sample)
    drawing.text(10, 18, f"{len(SAMPLES)} samples, {tokens} tokens", SOFT, "start")
    for index, sample in enumerate(SAMPLES):
        x, y = 90, 28 + index * ROW
        drawing.text(10, y + ROW / 2 + 2, f"sample {index}", INK, "start")
        for name in sample:
            drawing.box(x, y, CELL * PARTS[name], ROW - 6, PART_COLOR, name)
            x += CELL * PARTS[name]
    top = 28 + len(SAMPLES) * ROW + 20
    drawing.text(10, top + 2, f"prefix tree, {sum(PARTS.values())} tokens", SOFT, "start")
    for run in runs():
        x = 90 + CELL * run.x
        for name, tokens in groupby(run.parts):
            width = CELL * len(list(tokens))
            drawing.box(x, top + 12 + ROW * run.y, width, ROW * run.leaves - 6, PART_COLOR, name)
            x += width
    return drawing


class Run(NamedTuple):
    """Tokens of a micro-batch that no fork divides."""

    x: int
    """Place in the sample."""
    y: int
    """Leaves of the tree above it."""
    leaves: int
    micro_batch: int
    parts: list[str]
    """Of every token."""


def runs() -> Iterator[Run]:
    tree, plan = make_plan()
    names = [part_of(token) for token in plan.token_ids_U.tolist()]
    found = tree_runs(plan, tree, lambda start, end: ",".join(names[start:end]))
    columns = (found[key] for key in ("x", "y", "height", "micro_batch", "text"))
    for x, y, leaves, micro_batch, text in zip(*columns, strict=True):
        yield Run(x, y, leaves, micro_batch, text.split(","))


def draw_plan() -> Drawing:
    """The tree again, a colour a micro-batch."""
    _, plan = make_plan()
    width = 90 + CELL * max(run.x + len(run.parts) for run in runs()) + 20
    drawing = Drawing(width, 28 + ROW * len(LEAVES) + 8, f"Micro-batches of at most {BUDGET} tokens")
    drawing.text(10, 18, f"micro-batches of at most {BUDGET} tokens", SOFT, "start")
    for run in runs():
        place = (90 + CELL * run.x, 28 + ROW * run.y, CELL * len(run.parts), ROW * run.leaves - 6)
        drawing.box(*place, COLORS[run.micro_batch], kind(plan.micro_batches[run.micro_batch]))
    return drawing


def draw_passes() -> Drawing:
    """Executions in order, what they read, and the tokens that are cached meanwhile."""
    _, plan = make_plan()
    executions = make_timeline(plan, SHAPE, FOOTPRINT).executions
    step, left, scale = 84, 120, 5
    peak = max(e.bytes for e in executions)
    ground = 126 + scale * peak
    drawing = Drawing(left + step * len(executions) + 20, ground + 34, "The two passes, and what is cached")
    num_first = sum(not e.backward for e in executions)
    drawing.text(left + step * num_first / 2, 18, "pass 1: forward", SOFT)
    drawing.text(left + step * (num_first + len(executions)) / 2, 18, "pass 2: forward and backward", SOFT)
    drawing.text(10, 49, "micro-batch", INK, "start")
    drawing.text(10, 79, "reads K/V of", INK, "start")
    drawing.text(10, 112, "cached tokens:", INK, "start")
    drawing.text(10, 130, "K/V", COLORS[1], "start")
    drawing.text(10, 148, "gradients", "#c26a1b", "start")
    for index, execution in enumerate(executions):
        x, micro_batch = left + step * index, plan.micro_batches[execution.micro_batch]
        drawing.box(x, 30, step - 6, 30, COLORS[micro_batch.index], kind(micro_batch))
        writers = sorted({plan.blocks[block].writer for block in execution.reads})
        drawing.text(x + step / 2 - 3, 79, ", ".join(map(str, writers)) or "none", SOFT)
        kv, grads = scale * execution.kv_bytes, scale * execution.grad_bytes
        drawing.rect(x, ground - kv, step - 6, kv, COLORS[1])
        drawing.rect(x, ground - kv - grads, step - 6, grads, COLORS[2])
        drawing.text(x + step / 2 - 3, ground + 18, f"{execution.kv_bytes} + {execution.grad_bytes}", SOFT)
    line = left + step * num_first - 3
    drawing.parts.append(f'<line x1="{line}" x2="{line}" y1="8" y2="{ground + 24}" stroke="{SOFT}"/>')
    return drawing


def draw_mask() -> Drawing:
    """Which keys the queries of the widest leaf micro-batch see."""
    _, plan = make_plan()
    chosen = max((m for m in plan.micro_batches if not m.is_spine), key=lambda m: len({*m.last_S.tolist()}))
    path_U = [
        u for block in chosen.path_blocks for u in range(plan.blocks[block].span.start, plan.blocks[block].span.end)
    ]
    keys_S = [*path_U, *chosen.tokens_T.tolist()]
    left, top = 110, 66
    drawing = Drawing(
        left + CELL * len(keys_S) + 20, top + CELL * (chosen.num_tokens + 2) + 14, f"Mask of {kind(chosen)}"
    )
    drawing.text(left + CELL * chosen.path_len / 2, 18, "cached path", SOFT)
    drawing.text(left + CELL * (chosen.path_len + chosen.num_tokens / 2), 18, f"tokens of {kind(chosen)}", SOFT)
    for start, size, name in _names(keys_S, plan):
        drawing.box(left + CELL * start, 28, CELL * size, 28, PART_COLOR, name)
    for start, size, name in _names(chosen.tokens_T.tolist(), plan):
        drawing.box(10, top + CELL * start, left - 18, CELL * size, PART_COLOR, name)
    for key, (first, last) in enumerate(zip(chosen.first_S.tolist(), chosen.last_S.tolist(), strict=True)):
        x = left + CELL * key
        for query in range(chosen.num_tokens):
            fill = COLORS[1] if first <= query < last else "#f3f4f6"
            drawing.rect(x, top + CELL * query, CELL - 2, CELL - 2, fill)
        for offset, number in ((0, first), (1, last)):
            drawing.text(x + CELL / 2 - 1, top + CELL * (chosen.num_tokens + offset) + 20, str(number))
    for offset, name in ((0, "first"), (1, "last")):
        drawing.text(10, top + CELL * (chosen.num_tokens + offset) + 20, name, INK, "start")
    return drawing


def _names(tokens: list[int], plan: ExecutionPlan) -> list[tuple[int, int, str]]:
    """Start, length and name of the parts that tokens lie in."""
    found: list[tuple[int, int, str]] = []
    for place, token in enumerate(tokens):
        name = part_of(int(plan.token_ids_U[token]))
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], found[-1][1] + 1, name)
        else:
            found.append((place, 1, name))
    return found


PICTURES = {"tree": draw_tree, "plan": draw_plan, "passes": draw_passes, "mask": draw_mask}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the pictures instead of writing them")
    options = parser.parse_args()
    differing = []
    for name, draw in PICTURES.items():
        path, svg = FOLDER / f"{name}.svg", draw().svg()
        if not options.check:
            path.write_text(svg)
        elif not path.is_file() or path.read_text() != svg:
            differing.append(path)
    for path in differing:
        print(f"{path} is out of date: run scripts/concept_pictures.py", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
