"""``psrl plan``: its options, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psrl.analyze.options import DEFAULT_SHAPE
from psrl.analyze.shapes import DTYPE_BYTES
from psrl.cli.options import option
from psrl.model_sizes import NAMED_MODELS
from psrl.plan_view.options import PlanOptions

_PLAN, _INPUT, _OUTPUT = "Plan", "Input", "Output"

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
]
Shape = Annotated[str, option(_PLAN, f"Model: {', '.join(NAMED_MODELS)}, a config.json or a folder with one.")]
DType = Annotated[str, option(_PLAN, "Of parameters and K/V.", tuple(DTYPE_BYTES))]
MaxTokens = Annotated[int, option(_PLAN, "Most tokens of a micro-batch.")]
KVCacheBytes = Annotated[int | None, option(_PLAN, "Most bytes of cached K/V and their gradients; no limit if absent.")]
KVHostBytes = Annotated[
    int | None, option(_PLAN, "Most bytes of host memory for what that cannot hold even in waves; none if absent.")
]
KVRecompute = Annotated[bool, option(_PLAN, "Compute prefixes again where the budget holds them in no other way.")]
ForwardOnly = Annotated[
    bool,
    typer.Option("--forward-only", help="Plan old log-prob or reference, not an update.", rich_help_panel=_PLAN),
]
Limit = Annotated[int | None, option(_INPUT, "Read only the first rows (lines) of the input.")]
Tokenizer = Annotated[
    str | None,
    option(_INPUT, "A folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes' (chat rows, if not given)."),
]
Mode = Annotated[str, option(_INPUT, "For chat traces: step (a sample per assistant message) or trajectory.")]
Trace = Annotated[Path | None, option(_OUTPUT, "File for a Chrome trace: open it in Perfetto or chrome://tracing.")]
Html = Annotated[Path | None, option(_OUTPUT, "File for a page with the tree and the timeline; it needs no network.")]
Json = Annotated[Path | None, option(_OUTPUT, "File for all figures.")]


def plan(
    files: Files,
    shape: Shape = DEFAULT_SHAPE,
    dtype: DType = "bfloat16",
    max_tokens: MaxTokens = 4096,
    kv_cache_bytes: KVCacheBytes = None,
    kv_host_bytes: KVHostBytes = None,
    kv_recompute: KVRecompute = True,
    forward_only: ForwardOnly = False,
    limit: Limit = None,
    tokenizer: Tokenizer = None,
    mode: Mode = "step",
    trace: Trace = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Plan recorded samples as one mini-batch and show the plan as a picture. Needs no torch."""
    options = PlanOptions(
        files=tuple(files),
        shape=shape,
        dtype=dtype,
        max_tokens=max_tokens,
        kv_cache_bytes=kv_cache_bytes,
        kv_host_bytes=kv_host_bytes,
        kv_recompute=kv_recompute,
        forward_only=forward_only,
        limit=limit,
        tokenizer=tokenizer,
        mode=mode,
        trace=trace,
        html=html,
        json=json,
    )
    from psrl.plan_view.job import run_plan

    run_plan(options, lambda text: print(f"psrl: {text}", file=sys.stderr))
