#!/usr/bin/env python
"""Update, reference and old log-prob of a model with random weights: psrl against veRL's packed path, in one run.

    python benchmarks/step.py alfworld_scripted.jsonl.gz --tokenizer qwen.tiktoken --out step.json       # on a GPU
    python benchmarks/step.py --textworld 4 --model tiny --max-tokens 2048 --out step.json               # to see it run

Each trace is one ``psrl replay --sharing both``: the two sides in turn on one device, seconds as medians, with the
ratio, the ideal (of FLOPs), the share of it and the peak of memory. Then three runs of the first rows tell the error of
bfloat16: with and without sharing against float32, on the same weights. Without sharing is veRL's engine as it is: on a
GPU TransformerEngine's flash attention of packed sequences, or flash-attn's where TransformerEngine is not installed
(the report says which). float32 runs with sharing, since flash attention has no float32; that sharing is exact in
float32 is what the test suite shows. Options after ``--`` go to ``psrl replay``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay import PHASES, Run, markdown, replay

from psrl.model_sizes import NAMED_MODELS, ModelSizes

TINY = ModelSizes("tiny", 2, 64, 4, 2, 16, 128, 512, is_tied=True)
MODELS = {TINY.name: TINY} | {name: NAMED_MODELS[name] for name in NAMED_MODELS if name.startswith("qwen2.5")}
MAX_ERROR_RATIO = 1.1
"""Most that the error of bfloat16 may grow by sharing."""
TRANSFORMER_ENGINE = "TransformerEngine"
EXACT_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""TransformerEngine multiplies float32 matrices as TF32 otherwise."""
ERRORS = {"log_probs": "log-probs", "entropy": "entropies", "gradients": "gradients"}


def write_model(sizes: ModelSizes, seed: int, folder: Path) -> None:
    """A Qwen2.5 checkpoint of these sizes with random weights that bfloat16 holds exactly."""
    import torch
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=131_072,
        tie_word_embeddings=sizes.is_tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model: Any = transformers.Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def generate_traces(num_games: int, folder: Path) -> Path:
    """Step traces of generated TextWorld games, one row an episode."""
    command = [sys.executable, "-m", "psrl.agents.textworld_traces", "--out", str(folder), "--tasks", str(num_games)]
    outcome = subprocess.run([*command, "--trials", "1"], stdout=subprocess.PIPE, text=True)
    if outcome.returncode:
        sys.exit(f"{outcome.stdout}\ngenerating TextWorld traces failed with exit code {outcome.returncode}")
    return next(path for path in sorted(folder.glob("*.jsonl*")) if "tree" not in path.name)


def unshared_attention() -> str:
    """What attends on the side without sharing."""
    from psrl.integrations.verl.compat import quiet_upstream

    with quiet_upstream():
        import torch

        from psrl.integrations.megatron.local_spec import uses_transformer_engine
    if uses_transformer_engine():
        return TRANSFORMER_ENGINE
    return "flash" if torch.cuda.is_available() else "sdpa"


def bfloat16_errors(trace: Path, options: Sequence[str], scratch: Path) -> dict[str, dict[str, float]]:
    """Of every output: the errors of both sides against float32, relative in the 2-norm, and their ratio."""
    dumps: dict[str, Path] = {}
    for name, dtype, sharing in (
        ("exact", "float32", "on"), ("shared", "bfloat16", "on"), ("unshared", "bfloat16", "off")
    ):  # fmt: skip
        scratch.mkdir(exist_ok=True)
        dumps[name] = scratch / name
        replay([trace], [*options, "--dtype", dtype, "--dump", str(dumps[name])], sharing, EXACT_FLOAT32)
    return {kind: _errors(dumps, kind) for kind in ERRORS}


def _errors(dumps: dict[str, Path], kind: str) -> dict[str, float]:
    from safetensors import safe_open

    file, prefix = ("grads.safetensors", "") if kind == "gradients" else ("samples.safetensors", f"{kind}.")
    squares = dict.fromkeys(("exact", "shared", "unshared"), 0.0)
    with (
        safe_open(dumps["exact"] / file, "pt") as exact,
        safe_open(dumps["shared"] / file, "pt") as shared,
        safe_open(dumps["unshared"] / file, "pt") as unshared,
    ):
        for key in exact.keys():  # noqa: SIM118  a file, not a mapping
            if not key.startswith(prefix):
                continue
            truth = exact.get_tensor(key).double()
            squares["exact"] += float(truth.square().sum())
            squares["shared"] += float((shared.get_tensor(key).double() - truth).square().sum())
            squares["unshared"] += float((unshared.get_tensor(key).double() - truth).square().sum())
    if not squares["unshared"]:
        sys.exit(f"bfloat16 without sharing has no error in {ERRORS[kind]}: nothing to compare with")
    relative = {name: (squares[name] / squares["exact"]) ** 0.5 for name in ("shared", "unshared")}
    return {**relative, "ratio": relative["shared"] / relative["unshared"]}


def phase_table(runs: Sequence[Run]) -> str:
    """Seconds, and peaks of the GPU's memory beside weights, gradients and optimizer; on the CPU only the cache's is
    known."""
    rows = [["trace", "phase", "shared s", "unshared s", "shared MiB", "unshared MiB", "K/V cache MiB"]]
    rows.append(["---", "---", *["---:"] * 5])
    for run in runs:
        for phase, label in PHASES.items():
            values = run.record[phase]
            found = (values["peak_bytes_shared"], values["peak_bytes_unshared"], values["kv_bytes_peak"])
            seconds = [f"{values[f'seconds_{side}']:.3f}" for side in ("shared", "unshared")]
            rows.append([run.name, label, *seconds, *("-" if x is None else f"{x / 2**20:,.1f}" for x in found)])
    return table(rows)


def error_table(errors: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        ["trace", "bfloat16 against float32", "shared", "unshared", "ratio"],
        ["---", "---", "---:", "---:", "---:"],
    ]
    for trace, by_kind in errors.items():
        for kind, values in by_kind.items():
            numbers = [f"{values['shared']:.2e}", f"{values['unshared']:.2e}", f"{values['ratio']:.3f}"]
            rows.append([trace, ERRORS[kind], *numbers])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def misses(runs: Sequence[Run], errors: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """What the project promises and was not measured."""
    found = [f"{run.name}: {miss}" for run in runs for miss in run.misses()]
    for trace, by_kind in errors.items():
        for kind, values in by_kind.items():
            if not values["ratio"] <= MAX_ERROR_RATIO:
                found.append(f"{trace}: error of {ERRORS[kind]} {values['ratio']:.3f} times the unshared one's")
    return found


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    argv, further = sys.argv[1:], []
    if "--" in argv:
        argv, further = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="step traces or token samples")
    parser.add_argument("--textworld", type=int, metavar="GAMES", help="traces of generated games, instead or besides")
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=list(MODELS), help="shape of the random model")
    parser.add_argument("--tokenizer", default="bytes", help="for chat traces: as psrl replay --tokenizer")
    parser.add_argument("--max-tokens", type=int, default=8192, help="most tokens of a micro-batch")
    parser.add_argument("--limit", type=int, default=8, help="rows read of each trace")
    parser.add_argument("--error-limit", type=int, default=1, help="rows of the runs that tell the error of bfloat16")
    parser.add_argument("--repeat", type=int, default=5, help="interleaved repeats; seconds are medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 where a promise is not kept")
    args = parser.parse_args(argv)
    if not args.traces and not args.textworld:
        parser.error("name a TRACE, or --textworld GAMES to generate some")
    for trace in args.traces:
        if not trace.is_file():
            parser.error(f"{trace}: no such file")
    return args, further


def main() -> int:
    args, further = _arguments()
    attention = unshared_attention()
    runs: list[Run] = []
    errors: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="psrl_step_") as folder:
        scratch, traces = Path(folder), list(args.traces)
        if args.textworld:
            traces.append(generate_traces(args.textworld, scratch / "textworld"))
        write_model(MODELS[args.model], args.seed, scratch / "model")
        common = ["--model", str(scratch / "model"), "--max-tokens", str(args.max_tokens)]
        common += ["--tokenizer", args.tokenizer, "--seed", str(args.seed), *further]
        if attention != TRANSFORMER_ENGINE:
            common += ["--unshared-attention", attention]
        for trace in traces:
            name = trace.name.removesuffix(".gz").removesuffix(".jsonl")
            print(f"{name} ...", file=sys.stderr)
            timed = [*common, "--dtype", "bfloat16", "--repeat", str(args.repeat), "--limit", str(args.limit)]
            runs.append(Run(name, replay([trace], timed), False, "speedup"))
            first_rows = [*common, "--limit", str(args.error_limit)]
            errors[name] = bfloat16_errors(trace, first_rows, scratch / f"dumps_{name}")
    print(markdown(runs), phase_table(runs), error_table(errors), sep="\n\n")
    found = misses(runs, errors)
    if args.out is not None:
        report = {
            "device": runs[0].record["device"],
            "model": args.model,
            "unshared_attention": attention,
            "runs": {run.name: run.record for run in runs},
            "bfloat16_errors": errors,
            "misses": found,
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
