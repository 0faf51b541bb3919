"""``psrl analyze``: its options, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psrl.analyze.options import DEFAULT_BUDGETS, DEFAULT_SHAPE, AnalyzeOptions
from psrl.analyze.shapes import DTYPE_BYTES
from psrl.cli.options import option
from psrl.model_sizes import NAMED_MODELS

_MODEL, _INPUT, _OUTPUT = "Prediction", "Input", "Output"

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
]
Shape = Annotated[
    str, option(_MODEL, f"Model to predict for: {', '.join(NAMED_MODELS)}, a config.json or a folder with one.")
]
DType = Annotated[str, option(_MODEL, "Of parameters and K/V.", tuple(DTYPE_BYTES))]
MaxTokens = Annotated[
    list[int] | None,
    option(
        _MODEL,
        f"Budget: most tokens of a micro-batch. May be repeated. {', '.join(map(str, DEFAULT_BUDGETS))} if not given.",
    ),
]
MemoryGiB = Annotated[
    float | None, option(_MODEL, "Memory for K/V, kept attention and one micro-batch; a best budget has to fit it.")
]
MiniBatch = Annotated[
    int | None, option(_MODEL, "Samples of an optimizer step, in input order; all of them if not given.")
]
Limit = Annotated[int | None, option(_INPUT, "Read only the first rows (lines) of the input.")]
Tokenizer = Annotated[
    str | None,
    option(
        _INPUT,
        "A folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes'. Chat traces are tokenised with it "
        "(bytes if not given), token samples are shown as text with it.",
    ),
]
Mode = Annotated[str, option(_INPUT, "For chat traces: step (a sample per assistant message) or trajectory.")]
Json = Annotated[Path | None, option(_OUTPUT, "File for all figures.")]
Html = Annotated[Path | None, option(_OUTPUT, "File for a page with plots; it needs no network.")]


def analyze(
    files: Files,
    shape: Shape = DEFAULT_SHAPE,
    dtype: DType = "bfloat16",
    max_tokens: MaxTokens = None,
    memory_gib: MemoryGiB = None,
    mini_batch: MiniBatch = None,
    limit: Limit = None,
    tokenizer: Tokenizer = None,
    mode: Mode = "step",
    json: Json = None,
    html: Html = None,
) -> None:
    """Say what prefix sharing is worth for recorded samples, and what breaks it. Needs no torch."""
    options = AnalyzeOptions(
        files=tuple(files),
        shape=shape,
        dtype=dtype,
        max_tokens=tuple(max_tokens or DEFAULT_BUDGETS),
        memory_gib=memory_gib,
        mini_batch=mini_batch,
        limit=limit,
        tokenizer=tokenizer,
        mode=mode,
        json=json,
        html=html,
    )
    from psrl.analyze.job import run_analyze
    from psrl.analyze.report import print_record

    print_record(run_analyze(options, lambda text: print(f"psrl: {text}", file=sys.stderr)))
