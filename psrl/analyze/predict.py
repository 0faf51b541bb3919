"""Predictions of an update at several micro-batch budgets: work, speed-up and memory by system.

A budget is the most tokens of a micro-batch (``psrl.max_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from psrl.analyze.measures import plan_batch, spine_tokens, total_work, tree_packing
from psrl.analyze.radix import RadixTree, TreeShape
from psrl.analyze.shapes import ShapedModel
from psrl.cost import ModelShape, Work
from psrl.kept_attention import keep_attention
from psrl.planner import build_plan
from psrl.tree import build_tree
from psrl.types import ExecutionPlan, IntArray

NEAR_BEST = 0.02
"""Speed-ups this close to the best are as good: the smallest such budget needs the least memory."""


@dataclass(slots=True)
class BudgetFigures:
    """One budget, added up over mini-batches; bytes and largest micro-batches are maxima over them.

    ``computed_tokens_*`` count tokens that go through a forward: psrl's are the distinct ones and the spine's second
    forward; tree packing's are defined in ``measures.tree_packing``. FLOPs are those of an update: forward, backward,
    and the spine's extra forward.
    """

    max_tokens: int
    spine_tokens: int = 0
    micro_batches: int = 0
    waves: int = 0
    computed_tokens_unshared: int = 0
    computed_tokens_tree_packing: int = 0
    computed_tokens_psrl: int = 0
    flops_unshared: float = 0.0
    flops_tree_packing: float = 0.0
    flops_psrl: float = 0.0
    forward_flops_psrl: float = 0.0
    """Of a forward-only phase: old log-prob, reference."""
    kv_bytes_peak: int = 0
    """K/V and gradient accumulators, all layers and heads on one rank."""
    attention_bytes: int = 0
    """What an update keeps of attention between its passes, where there is room."""
    activation_bytes: int = 0
    """Estimate for the largest micro-batch, without recompute, with its logits."""
    memory_bytes: int = 0
    """What grows with the data: the cache, what is kept of attention, and the largest micro-batch."""
    largest_micro_batch_tree_packing: int = 0
    largest_micro_batch_psrl: int = 0

    def record(self, forward_flops_unshared: float) -> dict[str, float | int]:
        """As JSON values, with ratios."""
        return asdict(self) | {
            "speedup": self.speedup,
            "speedup_forward": _ratio(forward_flops_unshared, self.forward_flops_psrl),
            "speedup_tree_packing": _ratio(self.flops_unshared, self.flops_tree_packing),
            "speedup_over_tree_packing": _ratio(self.flops_tree_packing, self.flops_psrl),
        }

    @property
    def speedup(self) -> float:
        """Of an update over independent samples, by FLOPs."""
        return _ratio(self.flops_unshared, self.flops_psrl)


@dataclass(slots=True)
class WholeSamplePacking:
    """Tree packing with micro-batches of the longest sample, which is the least that it takes to run at all."""

    max_tokens: int = 0
    computed_tokens: int = 0
    flops: float = 0.0

    def add(self, tree: RadixTree, shape: TreeShape, model: ShapedModel) -> None:
        """Add a mini-batch. The longest sample is that of the mini-batch."""
        lengths = np.asarray(tree.samples.length, dtype=np.int64)
        packing = tree_packing(shape, lengths, int(lengths.max()))
        self.max_tokens = max(self.max_tokens, int(lengths.max()))
        self.computed_tokens += packing.work.tokens
        self.flops += update_flops(model.shape, packing.work)


def add_mini_batch(
    figures: Sequence[BudgetFigures],
    tree: RadixTree,
    shape: TreeShape,
    model: ShapedModel,
    memory_bytes: int | None,
) -> None:
    """Plan a mini-batch at every budget and add what the plans say. Mutates ``figures``.

    Args:
        memory_bytes: for the cache, attention that is kept and a micro-batch; None: no limit.
    """
    batch = plan_batch(tree, shape)
    every = total_work(tree)
    lengths = np.asarray(tree.samples.length, dtype=np.int64)
    planned = build_tree(batch)
    for row in figures:
        plan = build_plan(batch, max_tokens=row.max_tokens, shape=model.shape, footprint=model.footprint, tree=planned)
        activations = _activation_bytes(plan, model)
        if memory_bytes is not None:
            room = max(memory_bytes - activations, plan.stats.kv_bytes_peak)
            plan = keep_attention(plan, model.shape, replace(model.footprint, budget_bytes=room))
        packing = tree_packing(shape, lengths, row.max_tokens)
        spine = spine_tokens(shape, row.max_tokens)
        row.spine_tokens += spine
        row.micro_batches += plan.stats.num_micro_batches
        row.waves += plan.stats.num_waves
        row.computed_tokens_unshared += every.tokens
        row.computed_tokens_tree_packing += packing.work.tokens
        row.computed_tokens_psrl += plan.stats.unique_tokens + spine
        row.flops_unshared += update_flops(model.shape, every)
        row.flops_tree_packing += update_flops(model.shape, packing.work)
        row.flops_psrl += plan.stats.flops_shared
        row.forward_flops_psrl += model.shape.forward_flops(_unique_work(plan.edges.source_E, shape))
        row.kv_bytes_peak = max(row.kv_bytes_peak, plan.stats.kv_bytes_peak)
        row.attention_bytes = max(row.attention_bytes, plan.stats.attention_bytes)
        row.activation_bytes = max(row.activation_bytes, activations)
        used = plan.stats.kv_bytes_peak + plan.stats.attention_bytes + activations
        row.memory_bytes = max(row.memory_bytes, used)
        row.largest_micro_batch_psrl = max(row.largest_micro_batch_psrl, *(mb.num_tokens for mb in plan.micro_batches))
        row.largest_micro_batch_tree_packing = max(row.largest_micro_batch_tree_packing, packing.largest)


def _activation_bytes(plan: ExecutionPlan, model: ShapedModel) -> int:
    """Of the micro-batch that needs most."""
    return max(
        mb.num_tokens * model.activation_bytes_per_token + len(mb.rows_R) * model.logit_bytes_per_row
        for mb in plan.micro_batches
    )


def _unique_work(sources_E: IntArray, shape: TreeShape) -> Work:
    """Forward work of the distinct tokens. Edges come in order of their source tokens, and temperature is one."""
    first, last = shape.depth_V + 1, shape.depth_V + shape.length_V
    pairs = int(((first + last) * shape.length_V // 2).sum())
    return Work(shape.num_tokens, pairs, int(np.count_nonzero(np.diff(sources_E, prepend=-1))))


def update_flops(shape: ModelShape, work: Work) -> float:
    """Forward and backward."""
    return shape.forward_flops(work) + shape.backward_flops(work)


def best_budget(figures: Sequence[BudgetFigures], memory_bytes: int | None) -> BudgetFigures | None:
    """The smallest budget whose speed-up is near the best of those that fit; None where none fits."""
    fitting = [row for row in figures if memory_bytes is None or row.memory_bytes <= memory_bytes]
    if not fitting:
        return None
    wanted = (1 - NEAR_BEST) * max(row.speedup for row in fitting)
    return min((row for row in fitting if row.speedup >= wanted), key=lambda row: row.max_tokens)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 1.0
