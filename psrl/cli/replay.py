"""``psrl replay``: its options, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.options import option
from psrl.config import ATTENTION_BACKENDS
from psrl.replay.options import (
    DEFAULT_MAX_TOKENS,
    DTYPES,
    LOSS_AGG_MODES,
    LOSSES,
    RECOMPUTE,
    SHARING,
    Parallel,
    ReplayOptions,
    TinyModel,
)
from psrl.systems import SYSTEMS

_MODEL, _RUN, _PARALLEL, _LOSS = "Model", "Running", "Parallelism (local processes)", "Loss and optimizer"
_INPUT, _OUTPUT = "Input", "Output"

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
]
Model = Annotated[
    str, option(_MODEL, "A Hugging Face folder; smollm2; or tiny-qwen2, tiny-qwen3, tiny-qwen3-moe: random ones.")
]
Hidden = Annotated[int, option(_MODEL, "Hidden size of a tiny model.")]
Layers = Annotated[int, option(_MODEL, "Layers of a tiny model.")]
Heads = Annotated[int, option(_MODEL, "Attention heads of a tiny model.")]
KVHeads = Annotated[int, option(_MODEL, "Key/value heads of a tiny model.")]
DType = Annotated[str, option(_MODEL, "Parameters and activations.", DTYPES)]

Sharing = Annotated[
    str,
    option(
        _RUN,
        "Prefix sharing. off is veRL's own engine; both runs the two in turn and compares log-probs, gradients and "
        "metrics.",
        SHARING,
    ),
]
System = Annotated[
    str, option(_RUN, "Share prefixes as another system does, or without one of psrl's mechanisms.", tuple(SYSTEMS))
]
MaxTokens = Annotated[int, option(_RUN, "Most tokens of a micro-batch.")]
MiniBatch = Annotated[int | None, option(_RUN, "Samples of a mini-batch; all of them if not given.")]
Steps = Annotated[int, option(_RUN, "Update steps over all samples.")]
Repeat = Annotated[int, option(_RUN, "Times to run each phase, sides in turn; seconds are medians.")]
Attention = Annotated[str, option(_RUN, "Attention backend.", ATTENTION_BACKENDS)]
UnsharedAttention = Annotated[
    str | None,
    option(
        _RUN, "Attention backend of the side without sharing; --attention if not given. TransformerEngine has its own.",
        ATTENTION_BACKENDS,
    ),
]  # fmt: skip
Recompute = Annotated[str, option(_RUN, "Activation recompute.", RECOMPUTE)]
KVCacheBytes = Annotated[int | None, option(_RUN, "Most bytes of cached K/V and their gradients; no limit on a CPU.")]
KVHostBytes = Annotated[
    int | None, option(_RUN, "Most bytes of host memory for what that cannot hold even in waves; none if absent.")
]
KVRecompute = Annotated[bool, option(_RUN, "Compute prefixes again where the budget holds them in no other way.")]
Seed = Annotated[int, option(_RUN, "Seed of the random model and of the workers.")]
Tolerance = Annotated[
    float | None,
    option(_RUN, "Largest relative difference for --sharing both; by dtype if not given (bfloat16: none)."),
]

TP = Annotated[int, option(_PARALLEL, "Tensor parallel size, with sequence parallelism.")]
PP = Annotated[int, option(_PARALLEL, "Pipeline stages.")]
VPP = Annotated[int, option(_PARALLEL, "Model chunks of each stage (interleaved schedule).")]
CP = Annotated[int, option(_PARALLEL, "Ranks that split every micro-batch's tokens (context parallel).")]
EP = Annotated[int, option(_PARALLEL, "Ranks over which experts are spread, among those of the other sizes.")]
DP = Annotated[int, option(_PARALLEL, "Data parallel size: rows of a mini-batch are split.")]

Loss = Annotated[str, option(_LOSS, "veRL's loss_mode.", LOSSES)]
LossAggMode = Annotated[
    str | None, option(_LOSS, "token-mean if not given, seq-mean-token-mean for gspo.", LOSS_AGG_MODES)
]
LossScaleFactor = Annotated[int | None, option(_LOSS, "Divisor of seq-mean-token-sum-norm.")]
EntropyCoeff = Annotated[float, option(_LOSS, "Weight of the entropy bonus.")]
KLCoef = Annotated[float, option(_LOSS, "Weight of the KL loss to the reference.")]
Temperature = Annotated[float, option(_LOSS, "Logits are divided by it.")]
LearningRate = Annotated[float, option(_LOSS, "Learning rate of Adam.")]

Limit = Annotated[int | None, option(_INPUT, "Read only the first rows (lines) of the input.")]
Tokenizer = Annotated[
    str | None,
    option(
        _INPUT,
        "For chat traces: a folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes' (built in: ids are "
        "bytes). If not given, the model folder's own if it has ChatML tokens, else bytes.",
    ),
]
Mode = Annotated[str, option(_INPUT, "For chat traces: step (a sample per assistant message) or trajectory.")]

Dump = Annotated[Path | None, option(_OUTPUT, "Folder for log-probs, entropies and the first mini-batch's gradient.")]
Json = Annotated[Path | None, option(_OUTPUT, "File for the table.")]


def replay(
    files: Files,
    model: Model = "tiny-qwen2",
    hidden: Hidden = 256,
    layers: Layers = 4,
    heads: Heads = 4,
    kv_heads: KVHeads = 2,
    dtype: DType = "float32",
    sharing: Sharing = "on",
    system: System = "psrl",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    mini_batch: MiniBatch = None,
    steps: Steps = 1,
    repeat: Repeat = 1,
    attention: Attention = "auto",
    unshared_attention: UnsharedAttention = None,
    recompute: Recompute = "none",
    kv_cache_bytes: KVCacheBytes = None,
    kv_host_bytes: KVHostBytes = None,
    kv_recompute: KVRecompute = True,
    seed: Seed = 42,
    tolerance: Tolerance = None,
    tp: TP = 1,
    pp: PP = 1,
    vpp: VPP = 1,
    cp: CP = 1,
    ep: EP = 1,
    dp: DP = 1,
    loss: Loss = "vanilla",
    loss_agg_mode: LossAggMode = None,
    loss_scale_factor: LossScaleFactor = None,
    entropy_coeff: EntropyCoeff = 0.0,
    kl_coef: KLCoef = 0.0,
    temperature: Temperature = 1.0,
    lr: LearningRate = 1e-6,
    limit: Limit = None,
    tokenizer: Tokenizer = None,
    mode: Mode = "step",
    dump: Dump = None,
    json: Json = None,
) -> None:
    """Run old log-prob, reference and update on recorded samples through veRL's worker, with and without sharing."""
    options = ReplayOptions(
        files=tuple(files), model=model, tiny=TinyModel(hidden, layers, heads, kv_heads),
        parallel=Parallel(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, dp=dp), dtype=dtype, sharing=sharing,
        system=system, max_tokens=max_tokens, mini_batch=mini_batch, steps=steps, repeat=repeat, attention=attention,
        unshared_attention=unshared_attention, recompute=recompute, kv_cache_bytes=kv_cache_bytes,
        kv_host_bytes=kv_host_bytes, kv_recompute=kv_recompute, seed=seed, tolerance=tolerance, loss=loss,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor, entropy_coeff=entropy_coeff, kl_coef=kl_coef, temperature=temperature,
        lr=lr, limit=limit, tokenizer=tokenizer, mode=mode, dump=dump, json=json,
    )  # fmt: skip
    from psrl.replay.job import run_replay  # after the options have been checked: `psrl --help` needs none of it

    raise typer.Exit(run_replay(options))
