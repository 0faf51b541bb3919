"""Megatron's own pipeline schedules, timed with stages that sleep: what the schedule simulation is compared with.

Every stage is a process. A forward or backward of a micro-batch sleeps for its given time instead of computing, so a
few processors, busy with other things, are enough to time a pipeline of any size.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psrl.simulate.schedule import Pass, Pipeline
from psrl.types import FloatArray

REPOSITORY = Path(__file__).resolve().parents[1]
_HIDDEN = 8


@dataclass(frozen=True)
class Timed:
    """One run."""

    pipeline: Pipeline
    """With the seconds that every forward and backward really took: sleeping takes longer on a busy machine."""
    stage_seconds: tuple[float, ...]
    """From a common start until each stage was done."""


def measure_schedules(pipelines: list[Pipeline], timeout: float = 600.0) -> list[Timed]:
    """Run every pipeline, all of one number of stages and chunks, through ``get_forward_backward_func()``.

    Raises:
        RuntimeError: a stage failed; the message has the end of its output.
    """
    num_stages = pipelines[0].num_stages
    with tempfile.TemporaryDirectory(prefix="psrl_schedule_") as folder:
        (Path(folder) / "job.pkl").write_bytes(pickle.dumps(pipelines))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = []
        for stage in range(num_stages):
            with (Path(folder) / f"log.{stage}").open("w") as log:
                command = [sys.executable, "-m", "benchmarks.measured_schedule", folder, str(stage)]
                processes.append(
                    subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
                )
        try:
            for stage, process in enumerate(processes):
                if process.wait(timeout):
                    log = (Path(folder) / f"log.{stage}").read_text(errors="replace")
                    raise RuntimeError(f"stage {stage} failed:\n{log[-3000:]}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        stages = [pickle.loads((Path(folder) / f"result.{stage}").read_bytes()) for stage in range(num_stages)]
    return [_assembled(pipeline, [stage[index] for stage in stages]) for index, pipeline in enumerate(pipelines)]


_Op = tuple[int, int, int, bool]
"""(pass, virtual stage, micro-batch, is backward)."""


def _assembled(pipeline: Pipeline, stages: list[tuple[float, dict[_Op, float]]]) -> Timed:
    """One run from what its stages recorded."""
    took: dict[_Op, float] = {}
    for _, found in stages:
        took.update(found)
    passes = []
    for index, run in enumerate(pipeline.passes):

        def real(like_VM: FloatArray, is_backward: bool, index: int = index) -> FloatArray:
            return np.array(
                [[took[index, v, m, is_backward] for m in range(like_VM.shape[1])] for v in range(len(like_VM))]
            )

        passes.append(
            Pass(real(run.forward_VM, False), None if run.backward_VM is None else real(run.backward_VM, True))
        )
    real_pipeline = dataclasses.replace(pipeline, passes=tuple(passes))
    return Timed(real_pipeline, tuple(seconds for seconds, _ in stages))


# ------------------------------------------------------------------------------------------------------ in a process
def _main(folder: Path, stage: int) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from psrl.integrations.megatron import cpu_device

    pipelines: list[Pipeline] = pickle.loads((folder / "job.pkl").read_bytes())
    num_stages, num_chunks = pipelines[0].num_stages, pipelines[0].num_chunks
    cpu_device.install()
    store = dist.FileStore(str(folder / "store"), num_stages)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=stage, world_size=num_stages)
    with cpu_device.device_mode():
        mpu.initialize_model_parallel(
            pipeline_model_parallel_size=num_stages,
            virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        )
        zeros_VM = np.zeros((num_stages * num_chunks, 2 * num_stages))
        _timed(Pipeline((Pass(zeros_VM, zeros_VM),), num_stages, num_chunks), stage)  # connects the stages
        found = [_timed(pipeline, stage) for pipeline in pipelines]
    (folder / f"result.{stage}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _timed(pipeline: Pipeline, stage: int) -> tuple[float, dict[_Op, float]]:
    """Seconds until this stage is done with all passes, and those of everything it did."""
    import torch
    import torch.distributed as dist

    chunks = [_sleeping_chunk(pipeline, chunk * pipeline.num_stages + stage) for chunk in range(pipeline.num_chunks)]
    dist.barrier()
    start = time.perf_counter()
    for index, run in enumerate(pipeline.passes):
        with torch.set_grad_enabled(run.backward_VM is not None):
            _run_pass(chunks, index, run.num_micro_batches, forward_only=run.backward_VM is None)
    seconds = time.perf_counter() - start
    return seconds, {op: took for chunk in chunks for op, took in chunk.took.items()}


def _run_pass(chunks: list[Any], index: int, num_micro_batches: int, *, forward_only: bool) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.index = index

    def step(iterator: Any, model: Any) -> tuple[Any, Any]:
        return model(next(iterator)), lambda output: (output.sum(), {})

    iterators = [iter(range(num_micro_batches)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_micro_batches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _sleeping_chunk(pipeline: Pipeline, virtual: int) -> Any:
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer import TransformerConfig

    took: dict[_Op, float] = {}

    def sleep(op: _Op) -> None:
        run = pipeline.passes[op[0]]
        seconds_VM = run.backward_VM if op[3] else run.forward_VM
        assert seconds_VM is not None
        start = time.perf_counter()
        time.sleep(float(seconds_VM[virtual, op[2]]))
        took[op] = time.perf_counter() - start

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, index: int, micro_batch: int) -> torch.Tensor:
            ctx.op = (index, virtual, micro_batch, True)
            sleep((index, virtual, micro_batch, False))
            return x * weight

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
            sleep(ctx.op)
            return grads[0], grads[0].sum().reshape(1), None, None

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chunks = pipeline.num_chunks
            self.config = TransformerConfig(
                num_layers=pipeline.num_stages * chunks,
                hidden_size=_HIDDEN,
                num_attention_heads=1,
                pipeline_model_parallel_size=pipeline.num_stages,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                pipeline_dtype=torch.float32,
                variable_seq_lengths=False,
                overlap_p2p_comm=chunks > 1,
                batch_p2p_comm=False,
            )
            self.model_type = ModelType.encoder_or_decoder
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.vp_stage = virtual // pipeline.num_stages
            self.index = 0
            self.took = took
            self.input: torch.Tensor | None = None

        def set_input_tensor(self, tensor: Any) -> None:
            self.input = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, micro_batch: int) -> torch.Tensor:
            x = torch.ones(1, 1, _HIDDEN) if self.input is None else self.input
            return Sleep.apply(x, self.weight, self.index, micro_batch)  # pyright: ignore[reportReturnType]

    return Chunk()


def uneven_pipeline(num_stages: int, num_micro_batches: int, num_chunks: int, seed: int, mean: float) -> Pipeline:
    """A forward-only pass of half as many micro-batches, then training; a half to twice ``mean`` seconds each."""
    rng = np.random.default_rng(seed)
    sizes_M = rng.uniform(0.5, 2.0, num_micro_batches) * mean / num_chunks
    forward_VM = np.tile(sizes_M, (num_stages * num_chunks, 1))
    first = Pass(forward_VM[:, : num_micro_batches // 2])
    return Pipeline((first, Pass(forward_VM, 2 * forward_VM)), num_stages, num_chunks)


if __name__ == "__main__":
    from benchmarks.measured_schedule import _main as main

    main(Path(sys.argv[1]), int(sys.argv[2]))
