"""``psrl replay``: its options, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.replay.options import (
    ATTENTION,
    DEFAULT_MAX_TOKENS,
    DTYPES,
    LOSS_AGG_MODES,
    LOSSES,
    RECOMPUTE,
    SHARING,
    ReplayOptions,
    TinyModel,
)

_RUN, _LOSS, _INPUT, _MODEL = "Running", "Loss and optimizer", "Input", "Model"


def _choices(text: str, choices: tuple[str, ...]) -> str:
    return f"{text}: {', '.join(choices)}."


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, or tiny-qwen2 or tiny-qwen3: a random model made on the spot.",
            rich_help_panel=_MODEL,
        ),
    ] = "tiny-qwen2",
    hidden: Annotated[int, typer.Option(help="Hidden size of a tiny model.", rich_help_panel=_MODEL)] = 256,
    layers: Annotated[int, typer.Option(help="Layers of a tiny model.", rich_help_panel=_MODEL)] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads of a tiny model.", rich_help_panel=_MODEL)] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of a tiny model.", rich_help_panel=_MODEL)] = 2,
    dtype: Annotated[
        str, typer.Option(help=_choices("Parameters and activations", DTYPES), rich_help_panel=_MODEL)
    ] = "float32",
    sharing: Annotated[
        str,
        typer.Option(
            help=_choices("Prefix sharing", SHARING) + " off is veRL's own engine; both runs the two in turn and "
            "compares log-probs, gradients and metrics.",
            rich_help_panel=_RUN,
        ),
    ] = "on",
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a micro-batch.", rich_help_panel=_RUN)
    ] = DEFAULT_MAX_TOKENS,
    mini_batch: Annotated[
        int | None,
        typer.Option(help="Samples of a mini-batch; all of them if not given.", rich_help_panel=_RUN),
    ] = None,
    steps: Annotated[int, typer.Option(help="Update steps over all samples.", rich_help_panel=_RUN)] = 1,
    repeat: Annotated[
        int, typer.Option(help="Times to run each phase, sides in turn; seconds are medians.", rich_help_panel=_RUN)
    ] = 1,
    attention: Annotated[
        str, typer.Option(help=_choices("Attention backend", ATTENTION), rich_help_panel=_RUN)
    ] = "auto",
    recompute: Annotated[
        str, typer.Option(help=_choices("Activation recompute", RECOMPUTE), rich_help_panel=_RUN)
    ] = "none",
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(help="Most bytes of cached K/V and their gradients; no limit on a CPU.", rich_help_panel=_RUN),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random model and of the workers.", rich_help_panel=_RUN)] = 42,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference for --sharing both; by dtype if not given (bfloat16: none).",
            rich_help_panel=_RUN,
        ),
    ] = None,
    loss: Annotated[str, typer.Option(help=_choices("veRL's loss_mode", LOSSES), rich_help_panel=_LOSS)] = "vanilla",
    loss_agg_mode: Annotated[
        str | None,
        typer.Option(
            help=_choices("Aggregation", LOSS_AGG_MODES) + " token-mean if not given; seq-mean-token-mean for gspo.",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    loss_scale_factor: Annotated[
        int | None, typer.Option(help="Divisor of seq-mean-token-sum-norm.", rich_help_panel=_LOSS)
    ] = None,
    entropy_coeff: Annotated[float, typer.Option(help="Weight of the entropy bonus.", rich_help_panel=_LOSS)] = 0.0,
    kl_coef: Annotated[
        float, typer.Option(help="Weight of the KL loss to the reference.", rich_help_panel=_LOSS)
    ] = 0.0,
    temperature: Annotated[float, typer.Option(help="Logits are divided by it.", rich_help_panel=_LOSS)] = 1.0,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.", rich_help_panel=_LOSS)] = 1e-6,
    limit: Annotated[
        int | None, typer.Option(help="Read only the first rows (lines) of the input.", rich_help_panel=_INPUT)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For chat traces: a folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes' (built in: "
            "ids are bytes). If not given, the model folder's own, else bytes.",
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
    dump: Annotated[
        Path | None,
        typer.Option(
            help="Folder for log-probs, entropies and the first mini-batch's gradient.", rich_help_panel="Output"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the table.", rich_help_panel="Output")] = None,
) -> None:
    """Run old log-prob, reference and update on recorded samples through veRL's worker, with and without sharing."""
    options = ReplayOptions(
        files=tuple(files),
        model=model,
        tiny=TinyModel(hidden, layers, heads, kv_heads),
        sharing=sharing,
        max_tokens=max_tokens,
        dtype=dtype,
        attention=attention,
        recompute=recompute,
        kv_cache_bytes=kv_cache_bytes,
        loss=loss,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        entropy_coeff=entropy_coeff,
        kl_coef=kl_coef,
        temperature=temperature,
        lr=lr,
        steps=steps,
        repeat=repeat,
        mini_batch=mini_batch,
        limit=limit,
        tokenizer=tokenizer,
        mode=mode,
        seed=seed,
        tolerance=tolerance,
        dump=dump,
        json=json,
    )
    from psrl.replay.job import run_replay

    raise typer.Exit(run_replay(options))
