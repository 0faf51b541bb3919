"""``psrl sft``: its options, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.offline.options import SHARING, OfflineOptions
from psrl.replay.options import DEFAULT_MAX_TOKENS, DTYPES

_RUN, _INPUT, _MODEL = "Running", "Input", "Model"


def sft(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Chat traces or token samples, jsonl or jsonl.gz.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the trained model; must not exist yet.", rich_help_panel=_MODEL)
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, smollm2 (SmolLM2-135M-Instruct), or tiny-qwen2 or tiny-qwen3: a random model.",
            rich_help_panel=_MODEL,
        ),
    ] = "smollm2",
    dtype: Annotated[
        str, typer.Option(help=f"Parameters and activations: {', '.join(DTYPES)}.", rich_help_panel=_MODEL)
    ] = "float32",
    epochs: Annotated[int, typer.Option(help="Passes over all samples.", rich_help_panel=_RUN)] = 1,
    batch: Annotated[int, typer.Option(help="Samples of an optimizer step.", rich_help_panel=_RUN)] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.", rich_help_panel=_RUN)] = 1e-5,
    warmup: Annotated[
        int, typer.Option(help="Steps over which the learning rate rises from 0.", rich_help_panel=_RUN)
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a micro-batch.", rich_help_panel=_RUN)
    ] = DEFAULT_MAX_TOKENS,
    sharing: Annotated[
        str,
        typer.Option(help=f"Prefix sharing: {', '.join(SHARING)} (veRL's own engine).", rich_help_panel=_RUN),
    ] = "on",
    seed: Annotated[int, typer.Option(help="Seed of the samples' order and the worker.", rich_help_panel=_RUN)] = 42,
    limit: Annotated[
        int | None, typer.Option(help="Read only the first rows (lines) of the input.", rich_help_panel=_INPUT)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For chat traces: a folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes' (built in: "
            "ids are bytes). If not given, the model folder's own if it has ChatML tokens, else bytes.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="For chat traces: step (a sample per assistant message) or trajectory (one per row).",
            rich_help_panel=_INPUT,
        ),
    ] = "step",
    metrics: Annotated[
        Path | None, typer.Option(help="jsonl file, a line a step is added.", rich_help_panel="Output")
    ] = None,
) -> None:
    """Train on the assistant messages of recorded traces with veRL's supervised loss, prefixes shared."""
    options = OfflineOptions(
        objective="sft",
        files=tuple(files),
        model=model,
        out=out,
        epochs=epochs,
        batch=batch,
        lr=lr,
        warmup=warmup,
        max_tokens=max_tokens,
        sharing=sharing,
        dtype=dtype,
        limit=limit,
        tokenizer=tokenizer,
        mode=mode,
        seed=seed,
        metrics=metrics,
    )
    from psrl.offline.job import run_offline

    run_offline(options)
