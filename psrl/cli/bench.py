"""``psrl bench``: its options, and nothing else."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from psrl.agents.strategies import STRATEGIES
from psrl.bench.options import CLOCKS, COMPARED, HALF, BenchOptions
from psrl.cli.options import option
from psrl.replay.options import TinyModel
from psrl.systems import SYSTEMS, UNSHARED

_WHAT, _MODEL, _INPUT, _OUTPUT = "What is compared", "Measured and counted models", "Input", "Output"

Files = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="Chat traces, jsonl or jsonl.gz.", show_default=False)
]
Out = Annotated[Path, option(_OUTPUT, "Folder for JSON, CSV and plots.")]
Page = Annotated[Path | None, option(_OUTPUT, "Markdown page to write; plots go to img beside it.")]
Note = Annotated[str, option(_OUTPUT, "A sentence for the page: what a reader should know of the machine.")]
Strategies = Annotated[
    list[str] | None, option(_WHAT, "May be repeated; all that fit a trace if not given.", STRATEGIES)
]
Systems = Annotated[
    list[str] | None,
    option(_WHAT, f"May be repeated; {', '.join(COMPARED)} if not given.", (UNSHARED, *SYSTEMS, HALF)),
]
Repeat = Annotated[int, option(_WHAT, "Runs of every system, in turn; medians and spreads are of these.")]
Clock = Annotated[str, option(_WHAT, "Seconds that count: other processes disturb processor time least.", CLOCKS)]
Length = Annotated[list[int] | None, option(_WHAT, "Factor of the made-up sequences; may be repeated; 1, 2, 4, 8.")]
NumRanks = Annotated[list[int] | None, option(_WHAT, "Simulated ranks; may be repeated; 1, 8, 64 if not given.")]
Hidden = Annotated[int, option(_MODEL, "Hidden size of the random model that is measured.")]
Layers = Annotated[int, option(_MODEL, "Its layers.")]
MaxTokens = Annotated[int, option(_MODEL, "Most tokens of a micro-batch.")]
Shape = Annotated[str, option(_MODEL, "Model whose K/V bytes and FLOPs plans are counted for.")]
Simulated = Annotated[str, option(_MODEL, "Model on simulated ranks.")]
Calibration = Annotated[str, option(_MODEL, "Of the simulator.")]
Limit = Annotated[int | None, option(_INPUT, "Rows of each trace to read.")]
Turns = Annotated[int | None, option(_INPUT, "Turns of each row to keep.")]
Counted = Annotated[int, option(_INPUT, "Rows of each trace, with all turns, whose plans are counted.")]
Window = Annotated[int, option(_INPUT, "Turns of history under step_window.")]
Tokenizer = Annotated[str, option(_INPUT, "A folder with tokenizer.json, that file, a *.tiktoken file, or 'bytes'.")]
Seed = Annotated[int, option(_INPUT, "Of the random model and of made-up sequences.")]


def bench(
    files: Files,
    out: Out,
    page: Page = None,
    note: Note = "",
    strategy: Strategies = None,
    system: Systems = None,
    repeat: Repeat = 3,
    clock: Clock = "elapsed",
    length: Length = None,
    ranks: NumRanks = None,
    hidden: Hidden = 128,
    layers: Layers = 2,
    max_tokens: MaxTokens = 2048,
    shape: Shape = "qwen2.5-1.5b",
    simulated_model: Simulated = "qwen3-8b",
    calibration: Calibration = "h100-estimate",
    limit: Limit = None,
    turns: Turns = None,
    window: Window = 2,
    counted_rows: Counted = 8,
    tokenizer: Tokenizer = "bytes",
    seed: Seed = 42,
) -> None:
    """Compare psrl with other systems, and with itself without one mechanism, on recorded conversations."""
    chosen: dict[str, Any] = {
        name: tuple(values)
        for name, values in (("strategies", strategy), ("systems", system), ("lengths", length), ("ranks", ranks))
        if values
    }
    options = BenchOptions(
        files=tuple(files), out=out, page=page, tiny=TinyModel(hidden, layers), max_tokens=max_tokens, repeat=repeat,
        limit=limit, turns=turns, window=window, counted_rows=counted_rows, tokenizer=tokenizer, shape=shape,
        simulated_model=simulated_model, calibration=calibration, clock=clock, note=note, seed=seed, **chosen,
    )  # fmt: skip
    from psrl.bench.job import run_bench

    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["psrl", *words])
    run_bench(options, command, lambda text: print(f"psrl: {text}", file=sys.stderr))
