"""Plan recorded samples and show the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from psrl.analyze.report import format_bytes
from psrl.analyze.shapes import ShapedModel, load_shape
from psrl.analyze.text import Decode, load_decoder
from psrl.console import table_console
from psrl.data import ReplaySample, load_samples, load_tokenizer
from psrl.files import check_targets, write_json, write_text
from psrl.plan_view.options import PlanOptions
from psrl.plan_view.page import make_page
from psrl.plan_view.picture import make_picture
from psrl.plan_view.timeline import Timeline, make_timeline
from psrl.plan_view.trace import make_trace
from psrl.planner import build_plan
from psrl.tiers import HostTier
from psrl.tree import tree_of
from psrl.types import ExecutionPlan, SampleBatch


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A plan and its layout in time."""

    batch: SampleBatch
    plan: ExecutionPlan
    timeline: Timeline
    decode: Decode | None


def run_plan(options: PlanOptions, note: Callable[[str], None]) -> ExecutionPlan:
    """Plan, print a table, and write what the options ask for.

    Args:
        note: told what the user should know but did not ask for.

    Raises:
        PSRLError: the input, the shape, the budget or an option is not usable; the message is for the user.
    """
    check_targets({"--trace": options.trace, "--html": options.html, "--json": options.json}, options.files)
    model = load_shape(options.shape, options.dtype)
    planned = plan_files(options, model, note)
    title = f"psrl plan: {', '.join(path.name for path in options.files)}"
    if options.trace is not None:
        write_json("--trace", options.trace, make_trace(planned.plan, planned.timeline))
    if options.html is not None:
        tree = tree_of(planned.plan, planned.batch)
        picture = make_picture(planned.plan, tree, planned.timeline, planned.decode)
        write_text("--html", options.html, make_page(title, picture))
    if options.json is not None:
        write_json("--json", options.json, record_of(planned, model))
    _print(planned, model)
    return planned.plan


def plan_files(options: PlanOptions, model: ShapedModel, note: Callable[[str], None]) -> PlannedFile:
    """Read the samples of all files and plan them as one mini-batch."""
    is_chat = False

    def tokenizer():
        nonlocal is_chat
        is_chat = True
        return load_tokenizer(options.tokenizer)

    loaded = load_samples(options.files, tokenizer=tokenizer, mode=options.mode, limit=options.limit)
    if loaded.rows_without_samples:
        note(f"{len(loaded.rows_without_samples)} chat rows have no assistant message and give no sample")
    batch = batch_of(loaded.samples)
    footprint = replace(model.footprint, budget_bytes=options.kv_cache_bytes)
    plan = build_plan(
        batch,
        max_tokens=options.max_tokens,
        shape=model.shape,
        footprint=footprint,
        forward_only=options.forward_only,
        host=HostTier(options.kv_host_bytes, model.shape.num_layers) if options.kv_host_bytes else None,
        recompute=options.kv_recompute,
    )
    decode = load_decoder(options.tokenizer) if options.tokenizer is not None or is_chat else None
    return PlannedFile(batch, plan, make_timeline(plan, model.shape, footprint), decode)


def batch_of(samples: Sequence[ReplaySample]) -> SampleBatch:
    """Samples as the planner takes them. Groups are uids."""
    uids: dict[str, int] = {}
    groups = [uids.setdefault(sample.uid, len(uids)) for sample in samples]
    return SampleBatch(
        token_ids_N=np.concatenate([sample.input_ids_N for sample in samples]),
        position_ids_N=np.concatenate([sample.position_ids_N for sample in samples]),
        cu_seqlens=np.cumsum([0, *(sample.num_tokens for sample in samples)], dtype=np.int64),
        target_mask_N=np.concatenate([sample.loss_mask_N for sample in samples]),
        group_ids_S=np.asarray(groups, dtype=np.int64),
        temperatures_S=np.ones(len(samples)),
    )


def record_of(planned: PlannedFile, model: ShapedModel) -> dict[str, Any]:
    """The plan's figures as JSON values."""
    stats = planned.plan.stats
    return {
        **asdict(stats),
        "prefix_match_rate": stats.prefix_match_rate,
        "ideal_speedup": stats.ideal_speedup,
        "max_tokens": planned.plan.max_tokens,
        "model": {"name": model.name, "dtype": model.dtype, **asdict(model.shape)},
        "kv_blocks": len(planned.plan.blocks),
        "timeline": [asdict(e) for e in planned.timeline.executions],
    }


def _bytes(size: int) -> str:
    return f"{size:,} ({format_bytes(size)})"


def _host_rows(plan: ExecutionPlan) -> list[tuple[str, str]]:
    if plan.tiers is None:
        return []
    stats = plan.stats
    return [
        (name, _bytes(size))
        for name, size in (
            ("host bytes", stats.kv_host_bytes_peak),
            ("bytes moved to the host", stats.kv_bytes_to_host),
            ("bytes moved to the device", stats.kv_bytes_to_device),
        )
    ]


def _print(planned: PlannedFile, model: ShapedModel) -> None:
    plan, stats = planned.plan, planned.plan.stats
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    spine = sum(mb.is_spine for mb in plan.micro_batches)
    for name, value in (
        ("samples", f"{stats.num_samples:,}"),
        ("tokens", f"{stats.num_tokens:,}"),
        ("unique tokens", f"{stats.unique_tokens:,}"),
        ("match rate", f"{stats.prefix_match_rate:.2%}"),
        ("spine tokens", f"{stats.spine_tokens:,}"),
        ("micro-batches, spine / leaf", f"{spine:,} / {stats.num_micro_batches - spine:,}"),
        ("waves", f"{stats.num_waves:,}"),
        ("KV blocks", f"{len(plan.blocks):,}"),
        (f"peak KV bytes, {model.name}", _bytes(stats.kv_bytes_peak)),
        *([("kept attention bytes", _bytes(stats.attention_bytes))] if stats.attention_bytes else []),
        *_host_rows(plan),
        *([("tokens computed again", f"{stats.recomputed_tokens:,}")] if stats.recomputed_tokens else []),
        ("predicted speed-up", f"{stats.ideal_speedup:.2f}x"),
    ):
        table.add_row(name, value)
    table_console().print(table)
