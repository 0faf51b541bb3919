"""What the page draws: runs of tree tokens as rectangles, executions, and bytes over time.

Shape legend: U unique tokens in preorder, Z runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psrl.analyze.text import Decode, printable
from psrl.plan_view.timeline import Timeline
from psrl.tree import PrefixTree
from psrl.types import ExecutionPlan, IntArray

MAX_TEXTS = 3000
"""Runs that carry an excerpt of their text: the page should stay small."""
_EXCERPT_TOKENS, _EXCERPT_CHARACTERS = 24, 80


def make_picture(plan: ExecutionPlan, tree: PrefixTree, timeline: Timeline, decode: Decode | None) -> dict[str, Any]:
    """JSON values of the page."""
    stats = plan.stats
    return {
        "stats": {
            "samples": stats.num_samples,
            "tokens": stats.num_tokens,
            "unique_tokens": stats.unique_tokens,
            "spine_tokens": stats.spine_tokens,
            "micro_batches": stats.num_micro_batches,
            "waves": stats.num_waves,
            "max_tokens": plan.max_tokens,
            "match_rate": stats.prefix_match_rate,
            "ideal_speedup": stats.ideal_speedup,
            "kv_bytes_peak": timeline.peak_bytes,
        },
        "micro_batches": [
            {"spine": mb.is_spine, "tokens": mb.num_tokens, "path": mb.path_len, "rows": len(mb.rows_R)}
            for mb in plan.micro_batches
        ],
        "runs": tree_runs(plan, tree, _excerpts(plan, decode)),
        "executions": {
            "micro_batch": [e.micro_batch for e in timeline.executions],
            "wave": [e.wave for e in timeline.executions],
            "backward": [int(e.backward) for e in timeline.executions],
            "start": [e.start for e in timeline.executions],
            "flops": [e.flops for e in timeline.executions],
            "kv": [e.kv_bytes for e in timeline.executions],
            "grads": [e.grad_bytes for e in timeline.executions],
            "kv_after": [e.kv_bytes_after for e in timeline.executions],
            "grads_after": [e.grad_bytes_after for e in timeline.executions],
            "reads": [len(e.reads) for e in timeline.executions],
            "writes": [len(e.writes) for e in timeline.executions],
            "frees": [len(e.freed_kv) + len(e.freed_grads) for e in timeline.executions],
        },
    }


def _excerpts(plan: ExecutionPlan, decode: Decode | None) -> Callable[[int, int], str] | None:
    if decode is None:
        return None

    def excerpt(start: int, end: int) -> str:
        ids = plan.token_ids_U[start : min(end, start + _EXCERPT_TOKENS)].tolist()
        return printable(decode(ids), _EXCERPT_CHARACTERS)

    return excerpt


def tree_runs(
    plan: ExecutionPlan, tree: PrefixTree, excerpt: Callable[[int, int], str] | None = None
) -> dict[str, list[Any]]:
    """Columns of the runs of tokens that one micro-batch computes and that no fork divides.

    ``x`` and ``tokens``: place in the sample; ``y`` and ``height``: leaves above it in preorder, and its own.
    """
    owner_U = np.empty(tree.num_tokens, dtype=np.int64)
    for mb in plan.micro_batches:
        owner_U[mb.tokens_T] = mb.index
    tokens_U = np.arange(tree.num_tokens)
    leaves: IntArray = np.concatenate([[0], np.cumsum(tree.end_U == tokens_U + 1)])
    y_U, height_U = leaves[:-1], leaves[tree.end_U] - leaves[:-1]
    begins = np.ones(tree.num_tokens, dtype=bool)
    begins[1:] = (tree.parent_U[1:] != tokens_U[:-1]) | (owner_U[1:] != owner_U[:-1]) | (height_U[1:] != height_U[:-1])
    starts_Z = np.flatnonzero(begins)
    ends_Z = np.append(starts_Z[1:], tree.num_tokens)
    longest = set(np.argsort(starts_Z - ends_Z, kind="stable")[:MAX_TEXTS].tolist())
    return {
        "x": tree.depth_U[starts_Z].tolist(),
        "tokens": (ends_Z - starts_Z).tolist(),
        "y": y_U[starts_Z].tolist(),
        "height": height_U[starts_Z].tolist(),
        "micro_batch": owner_U[starts_Z].tolist(),
        "text": [
            excerpt(start, end) if excerpt is not None and i in longest else ""
            for i, (start, end) in enumerate(zip(starts_Z.tolist(), ends_Z.tolist(), strict=True))
        ],
    }
