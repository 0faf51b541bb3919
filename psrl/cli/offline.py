"""The options of ``scripts/train_torchrun.py``, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.offline.options import OBJECTIVES, RESUME, SHARING, Layout, OfflineOptions
from psrl.replay.options import DEFAULT_MAX_TOKENS, DTYPES, LOSS_AGG_MODES, LOSSES, RECOMPUTE, TinyModel

_RUN, _INPUT, _MODEL, _LOSS = "Running", "Input", "Model", "Loss"
_LAYOUT, _FILES = "Parallel sizes (what is left of the processes is data parallel)", "Checkpoints and output"


def _of(choices: tuple[str, ...]) -> str:
    return ", ".join(choices)


def offline(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
    ],
    model: Annotated[
        str,
        typer.Option(help="A Hugging Face folder, smollm2, or a random model: tiny-qwen2, ...", rich_help_panel=_MODEL),
    ],
    objective: Annotated[
        str,
        typer.Option(
            help=f"{_of(OBJECTIVES)}: policy gradient with the samples' advantages, or supervised.",
            rich_help_panel=_LOSS,
        ),
    ] = "pg",
    loss: Annotated[str, typer.Option(help=f"veRL's policy losses: {_of(LOSSES)}.", rich_help_panel=_LOSS)] = "vanilla",
    loss_agg_mode: Annotated[
        str | None, typer.Option(help=f"One of {_of(LOSS_AGG_MODES)}.", rich_help_panel=_LOSS)
    ] = None,
    loss_scale_factor: Annotated[
        int | None, typer.Option(help="Of seq-mean-token-sum-norm.", rich_help_panel=_LOSS)
    ] = None,
    entropy_coeff: Annotated[float, typer.Option(help="Weight of the entropy bonus.", rich_help_panel=_LOSS)] = 0.0,
    kl_coef: Annotated[
        float, typer.Option(help="Weight of the divergence from the initial model.", rich_help_panel=_LOSS)
    ] = 0.0,
    epochs: Annotated[int, typer.Option(help="Passes over all samples.", rich_help_panel=_RUN)] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Stop with the batch that holds this optimizer step.", rich_help_panel=_RUN)
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Samples whose old log-probs come from the same weights.", rich_help_panel=_RUN)
    ] = 64,
    mini_batch: Annotated[
        int | None, typer.Option(help="Samples of an optimizer step; if not given, --batch.", rich_help_panel=_RUN)
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.", rich_help_panel=_RUN)] = 1e-6,
    warmup: Annotated[
        int, typer.Option(help="Steps over which the learning rate rises from 0.", rich_help_panel=_RUN)
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a micro-batch.", rich_help_panel=_RUN)
    ] = DEFAULT_MAX_TOKENS,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(help="Most bytes of cached K/V on a rank.", rich_help_panel=_RUN)
    ] = None,
    sharing: Annotated[
        str, typer.Option(help=f"Prefix sharing: {_of(SHARING)} (veRL's own engine).", rich_help_panel=_RUN)
    ] = "on",
    recompute: Annotated[
        str, typer.Option(help=f"Activation recompute: {_of(RECOMPUTE)}.", rich_help_panel=_RUN)
    ] = "none",
    seed: Annotated[int, typer.Option(help="Seed of the order and the worker.", rich_help_panel=_RUN)] = 42,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank is given up.", rich_help_panel=_RUN)
    ] = 600.0,
    tp: Annotated[int, typer.Option(help="Tensor parallel (with sequence parallel).", rich_help_panel=_LAYOUT)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=_LAYOUT)] = 1,
    vpp: Annotated[int, typer.Option(help="Virtual stages of a pipeline rank.", rich_help_panel=_LAYOUT)] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel.", rich_help_panel=_LAYOUT)] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel.", rich_help_panel=_LAYOUT)] = 1,
    distributed_optimizer: Annotated[
        bool, typer.Option(help="Shard Adam's state over data-parallel ranks.", rich_help_panel=_LAYOUT)
    ] = True,
    dtype: Annotated[str, typer.Option(help=f"{_of(DTYPES)}.", rich_help_panel=_MODEL)] = "float32",
    hidden: Annotated[int, typer.Option(help="Hidden size of a random model.", rich_help_panel=_MODEL)] = 256,
    layers: Annotated[int, typer.Option(help="Layers of a random model.", rich_help_panel=_MODEL)] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads of a random model.", rich_help_panel=_MODEL)] = 4,
    kv_heads: Annotated[int, typer.Option(help="K/V heads of a random model.", rich_help_panel=_MODEL)] = 2,
    limit: Annotated[int | None, typer.Option(help="Read only the first rows.", rich_help_panel=_INPUT)] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For chat traces: as `psrl replay --tokenizer`.", rich_help_panel=_INPUT),
    ] = None,
    mode: Annotated[str, typer.Option(help="For chat traces: step or trajectory.", rich_help_panel=_INPUT)] = "step",
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of checkpoints.", rich_help_panel=_FILES)] = None,
    save_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints, besides the last.", rich_help_panel=_FILES),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep.", rich_help_panel=_FILES)] = None,
    resume: Annotated[
        str, typer.Option(help=f"{_of(RESUME)}: go on from the last complete checkpoint.", rich_help_panel=_FILES)
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the trained model.", rich_help_panel=_FILES)] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="jsonl file, a line a step is added.", rich_help_panel=_FILES)
    ] = None,
) -> None:
    """Train on stored agent traces without Ray, prefixes shared; start it with torchrun, or alone.

    Example: torchrun --nproc-per-node 2 scripts/train_torchrun.py traces.jsonl.gz --model tiny-qwen2
    """
    options = OfflineOptions(
        files=tuple(files),
        model=model,
        objective=objective,
        tiny=TinyModel(hidden, layers, heads, kv_heads),
        layout=Layout(tp, pp, vpp, cp, ep),
        out=out,
        epochs=epochs,
        steps=steps,
        batch=batch,
        mini_batch=mini_batch,
        loss=loss,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        entropy_coeff=entropy_coeff,
        kl_coef=kl_coef,
        lr=lr,
        warmup=warmup,
        max_tokens=max_tokens,
        kv_cache_bytes=kv_cache_bytes,
        sharing=sharing,
        dtype=dtype,
        recompute=recompute,
        distributed_optimizer=distributed_optimizer,
        limit=limit,
        tokenizer=tokenizer,
        mode=mode,
        seed=seed,
        checkpoints=checkpoints,
        save_every=save_every,
        keep=keep,
        resume=resume,
        timeout=timeout,
        metrics=metrics,
    )
    from psrl.offline.job import run_offline

    run_offline(options)
