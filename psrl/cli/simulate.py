"""``psrl simulate``: its options, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.options import option
from psrl.simulate.options import (
    DEFAULT_CALIBRATION,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MODEL,
    RECOMPUTE,
    SHARING,
    SimulateOptions,
)

_CLUSTER, _MODEL, _RUN, _INPUT = "Cluster", "Model", "Step", "Input and output"

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Token samples or chat traces, jsonl or jsonl.gz.", show_default=False),
]
Ranks = Annotated[int, option(_CLUSTER, "Ranks of the cluster.")]
TP = Annotated[int, option(_CLUSTER, "Tensor-parallel size, with sequence parallelism.")]
PP = Annotated[int, option(_CLUSTER, "Pipeline stages.")]
VPP = Annotated[int, option(_CLUSTER, "Virtual pipeline stages on each rank.")]
CP = Annotated[int, option(_CLUSTER, "Context-parallel size.")]
EP = Annotated[int, option(_CLUSTER, "Expert-parallel size.")]
Calibration = Annotated[
    str, option(_CLUSTER, "A JSON file of benchmarks/calibrate.py, or h100-estimate: peak figures, not measured.")
]
Model = Annotated[
    str, option(_MODEL, "qwen2.5-0.5b, qwen2.5-7b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, qwen3-235b-a22b, or a folder.")
]
Recompute = Annotated[str, option(_MODEL, "Activation recompute.", RECOMPUTE)]
DistributedOptimizer = Annotated[bool, option(_MODEL, "Optimizer states sharded over data-parallel ranks.")]
KVCacheBytes = Annotated[int | None, option(_MODEL, "Most bytes of cached K/V and their gradients on a rank.")]
Sharing = Annotated[str, option(_RUN, "psrl (on), veRL without sharing (off), or both.", SHARING)]
MaxTokens = Annotated[int, option(_RUN, "Most tokens of a micro-batch on a context-parallel rank.")]
InferMaxTokens = Annotated[int | None, option(_RUN, "The same of forward-only phases; as --max-tokens if not given.")]
MiniBatches = Annotated[int, option(_RUN, "Mini-batches (optimizer steps) that the rows are divided into.")]
Replicas = Annotated[int, option(_RUN, "Times that the trace is in the step, as other prompts each time.")]
Limit = Annotated[int | None, option(_INPUT, "Read only the first rows (lines) of the input.")]
Tokenizer = Annotated[
    str | None, option(_INPUT, "For chat traces: a folder with tokenizer.json, a file, or bytes (if not given).")
]
Mode = Annotated[str, option(_INPUT, "For chat traces: step (a sample per assistant message) or trajectory.")]
Json = Annotated[Path | None, option(_INPUT, "File for the tables.")]


def simulate(
    files: Files,
    ranks: Ranks = 8,
    tp: TP = 1,
    pp: PP = 1,
    vpp: VPP = 1,
    cp: CP = 1,
    ep: EP = 1,
    calibration: Calibration = DEFAULT_CALIBRATION,
    model: Model = DEFAULT_MODEL,
    recompute: Recompute = "full",
    distributed_optimizer: DistributedOptimizer = True,
    kv_cache_bytes: KVCacheBytes = None,
    sharing: Sharing = "both",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    infer_max_tokens: InferMaxTokens = None,
    mini_batches: MiniBatches = 1,
    replicas: Replicas = 1,
    limit: Limit = None,
    tokenizer: Tokenizer = None,
    mode: Mode = "step",
    json: Json = None,
) -> None:
    """Predict the step of a trace on N ranks: the real placement and plans, timed by a calibrated cost model."""
    options = SimulateOptions(
        files=tuple(files), ranks=ranks, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, model=model, calibration=calibration,
        sharing=sharing, max_tokens=max_tokens, infer_max_tokens=infer_max_tokens, mini_batches=mini_batches,
        replicas=replicas, kv_cache_bytes=kv_cache_bytes, recompute=recompute,
        distributed_optimizer=distributed_optimizer, limit=limit, tokenizer=tokenizer, mode=mode, json=json,
    )  # fmt: skip
    from psrl.simulate.job import run  # after the options have been checked

    run(options)
