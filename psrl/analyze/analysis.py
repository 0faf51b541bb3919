"""An analysis of recorded samples: read row by row, count, predict, find what breaks sharing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from psrl.analyze.breaks import Break, BreakSummary, find_breaks
from psrl.analyze.measures import shape_record, unique_within
from psrl.analyze.options import AnalyzeOptions
from psrl.analyze.predict import BudgetFigures, WholeSamplePacking, add_mini_batch
from psrl.analyze.radix import RadixTree, TreeShape
from psrl.analyze.shapes import ShapedModel, load_shape
from psrl.analyze.streams import ReadCounts, cut, read_streams
from psrl.analyze.text import Decode, load_decoder
from psrl.data import load_tokenizer
from psrl.errors import InputError
from psrl.types import IntArray

_WORST = 12


@dataclass(slots=True)
class Counts:
    """Exact counts, added up over mini-batches."""

    mini_batches: int = 0
    samples: int = 0
    tokens: int = 0
    unique_tokens: int = 0
    unique_within_group: int = 0
    unique_within_trajectory: int = 0
    targets: int = 0
    distinct_targets: int = 0
    """Targets that remain if equal prefixes are trained once."""


@dataclass(slots=True)
class Analysis:
    """Everything that was found out."""

    options: AnalyzeOptions
    model: ShapedModel
    rows: ReadCounts = field(default_factory=ReadCounts)
    counts: Counts = field(default_factory=Counts)
    budgets: list[BudgetFigures] = field(default_factory=list[BudgetFigures])
    whole_packing: WholeSamplePacking = field(default_factory=WholeSamplePacking)
    shapes: list[dict[str, float | int]] = field(default_factory=list[dict[str, float | int]])
    """Of every mini-batch's tree."""
    lengths: list[IntArray] = field(default_factory=list[IntArray])
    """Of every mini-batch's samples."""
    depth_tokens: list[tuple[IntArray, IntArray]] = field(default_factory=list[tuple[IntArray, IntArray]])
    """Of every mini-batch: depth of each node, and its tokens."""
    groups: set[str] = field(default_factory=set[str])
    sessions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    sampled_forks: int = 0
    breaks_by_kind: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    lost_by_kind: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    worst: list[Break] = field(default_factory=list[Break])
    has_text: bool = True


def analyze(options: AnalyzeOptions) -> Analysis:
    """Read all files and analyse them mini-batch by mini-batch.

    Raises:
        InputError: a file, the tokenizer or the shape is not usable, or there is no sample.
    """
    model = load_shape(options.shape, options.dtype)
    decode = load_decoder(options.tokenizer) if options.tokenizer is not None else None
    analysis = Analysis(options, model, budgets=[BudgetFigures(budget) for budget in options.max_tokens])
    streams = read_streams(
        options.files,
        tokenizer=lambda: load_tokenizer(options.tokenizer),
        mode=options.mode,
        limit=options.limit,
        counts=analysis.rows,
    )
    tree = RadixTree()
    for stream, is_last in cut(streams, options.mini_batch):
        tree.add(stream)
        if is_last:
            _add(analysis, tree, decode)
            tree = RadixTree()
    if tree.num_nodes:
        _add(analysis, tree, decode)
    if not analysis.counts.samples:
        names = ", ".join(map(str, options.files))
        num = analysis.rows.rows
        reason = f"none of the {num} rows has an assistant message" if num else "no rows in the file"
        raise InputError(f"{names}: no samples: {reason}")
    return analysis


def _add(analysis: Analysis, tree: RadixTree, decode: Decode | None) -> None:
    shape = TreeShape.of(tree)
    samples, counts = tree.samples, analysis.counts
    counts.mini_batches += 1
    counts.samples += len(samples.length)
    counts.tokens += sum(samples.length)
    counts.unique_tokens += shape.num_tokens
    counts.unique_within_group += unique_within(tree, samples.uid)
    counts.unique_within_trajectory += unique_within(tree, samples.session)
    counts.targets += sum(samples.num_targets)
    counts.distinct_targets += sum(int(np.count_nonzero(mask)) for mask in tree.targets)
    analysis.groups |= set(samples.uid)
    analysis.sessions |= set(samples.session)
    analysis.shapes.append(shape_record(tree, shape))
    analysis.lengths.append(np.asarray(samples.length, dtype=np.int64))
    analysis.depth_tokens.append((shape.depth_V, shape.length_V))
    if decode is None and analysis.rows.chat_rows:
        decode = load_decoder(None)  # chat rows were tokenised as bytes
    analysis.has_text = analysis.has_text and decode is not None
    _add_breaks(analysis, find_breaks(tree, decode, _WORST))
    add_mini_batch(analysis.budgets, tree, shape, analysis.model, analysis.options.memory_bytes)
    analysis.whole_packing.add(tree, shape, analysis.model)


def _add_breaks(analysis: Analysis, found: BreakSummary) -> None:
    analysis.sampled_forks += found.sampled_forks
    for key, (count, lost) in found.by_kind.items():
        analysis.breaks_by_kind[key] += count
        analysis.lost_by_kind[key] += lost
    analysis.worst = sorted([*analysis.worst, *found.worst], key=lambda b: -b.lost)[:_WORST]
