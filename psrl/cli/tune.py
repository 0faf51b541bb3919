"""``psrl tune``: its options, and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

from psrl.cli.options import option
from psrl.model_sizes import NAMED_MODELS
from psrl.tune.options import DTYPES, TuneOptions

_LAYER = "Layer"

Model = Annotated[
    str, typer.Argument(help=f"{', '.join(NAMED_MODELS)}, a config.json or a folder with one.", show_default=False)
]
DType = Annotated[str, option(_LAYER, "Of the model.", DTYPES)]
TensorParallel = Annotated[int, option(_LAYER, "Ranks that share a layer's heads.")]


def tune(model: Model, dtype: DType = "bfloat16", tp: TensorParallel = 1) -> None:
    """Measure attention of a model's layers on this GPU: tiles of the Triton kernels, then the backends. Jobs on such
    GPUs use the result. A few minutes, most of them compiling."""
    options = TuneOptions(model=model, dtype=dtype, tensor_parallel=tp)
    from psrl.tune.job import run_tune
    from psrl.tune.report import print_result, tile_line

    print_result(run_tune(options, lambda tried: print(tile_line(tried), flush=True)))
