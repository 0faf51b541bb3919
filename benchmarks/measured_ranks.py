"""Measured runs of one or more data-parallel processes: what the simulator is calibrated on and compared with.

Every rank is a process of its own (gloo on a CPU, NCCL where there are GPUs) that drives veRL's ``TrainingWorker``
without Ray, as ``psrl replay`` does, on the rows it is given. Recorded are, for every phase, the time that passed and
the processor time of every rank, and for every micro-batch its amounts and the time until the next one begins.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psrl.data import ReplaySample
from psrl.simulate.cluster import ClusterLayout
from psrl.simulate.phases import OLD_LOG_PROB, PHASES, REF, UPDATE
from psrl.simulate.sides import SHARED
from psrl.simulate.work import Amounts, micro_batch_amounts

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """One step of some samples on one side."""

    name: str
    side: str
    """``psrl`` or ``verl``."""
    rows: tuple[tuple[int, ...], ...]
    """Samples of every data-parallel rank, in order."""
    num_mini_batches: int
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """What every process does: each case ``repeats`` times, cases in turn."""

    model_folder: str
    tokenizer_folder: str
    samples: tuple[ReplaySample, ...]
    cases: tuple[Case, ...]
    repeats: int
    layout: ClusterLayout = field(default_factory=lambda: ClusterLayout(1))
    dtype: str = "float32"


@dataclass(frozen=True)
class Times:
    """Seconds."""

    wall: float
    cpu: float
    """Processor time of this process, all threads."""

    def minus(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Cycle:
    """From the start of a micro-batch's forward to the start of the next one's, within one schedule."""

    amounts: Amounts
    is_training: bool
    with_entropy: bool
    times: Times


@dataclass
class Measurement:
    """One phase of one case in one repeat, on one rank."""

    case: int
    repeat: int
    phase: str
    data_rank: int
    times: Times
    num_samples: int
    num_tokens: int
    calls: int = 0
    """Of the engine."""
    micro_batches: list[tuple[Amounts, bool]] = field(default_factory=list)
    """All of them, with whether a backward follows."""
    cycles: list[Cycle] = field(default_factory=list)
    """Without the last of every call, whose end cannot be told from the call's."""
    optimizer: Times = field(default_factory=lambda: Times(0.0, 0.0))


def measure(job: Job, *, timeout: float = 900.0) -> list[list[Measurement]]:
    """Run the job's processes; returns their measurements by rank.

    Raises:
        RuntimeError: a process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="psrl_ranks_") as folder:
        (Path(folder) / "job.pkl").write_bytes(pickle.dumps(job))
        processes = []
        for rank in range(job.layout.num_ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(job.layout.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            }
            with (Path(folder) / f"log.{rank}").open("w") as log:
                command = [sys.executable, "-m", "benchmarks.measured_ranks", folder]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY)
                )
        _wait(processes, Path(folder), timeout)
        return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(job.layout.num_ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Until all are done, or one has failed: then the others, which wait for it, are ended."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        if failed or late:
            rank = (failed or late)[0]
            reason = "failed" if failed else f"took longer than {timeout:.0f} s"
            log = (folder / f"log.{rank}").read_text(errors="replace")
            raise RuntimeError(f"rank {rank} {reason}:\n{log[-3000:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


# ---------------------------------------------------------------------------------------------------- in a process
class _Rank:
    """Workers of both sides, built when a case first needs them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._workers: dict[str, Any] = {}
        self.found: list[Measurement] = []

    def run(self) -> list[Measurement]:
        cases = list(enumerate(self._job.cases))
        for index, case in {case.side: (index, case) for index, case in cases}.values():
            self._run_case(index, case, -1)  # warms up
        for repeat in range(self._job.repeats):
            for index, case in cases if repeat % 2 else reversed(cases):
                self.found += self._run_case(index, case, repeat)
        return self.found

    def _worker(self, side: str) -> Any:
        from psrl.config import PSRLConfig
        from psrl.integrations.verl.local.actor_loss import make_actor_loss
        from psrl.integrations.verl.local.worker import build_training_worker

        if side not in self._workers:
            worker = build_training_worker(
                self._job.model_folder,
                dtype=self._job.dtype,
                psrl_config=PSRLConfig(enable=side == SHARED),
                model={"tokenizer_path": self._job.tokenizer_folder},
                vanilla_mbridge=True,
                **_engine_sizes(self._job.layout),
            )
            worker.set_loss_fn(make_actor_loss("vanilla", "token-mean"))
            self._workers[side] = worker
        return self._workers[side]

    def _run_case(self, index: int, case: Case, repeat: int) -> list[Measurement]:
        import numpy as np
        import torch

        from psrl.integrations.verl.local.replay_batch import ReplayBatch

        worker = self._worker(case.side)
        data_rank = worker.engine.get_data_parallel_rank()
        rows = case.rows[data_rank]
        batch = ReplayBatch([self._job.samples[row] for row in rows], dtype=torch.float32)
        found = []
        for phase in PHASES:
            options: dict[str, Any] = {"max_tokens": case.max_tokens, "temperature": 1.0}
            if phase == UPDATE:
                size = sum(len(rows) for rows in case.rows) // case.num_mini_batches
                options |= {
                    "calculate_entropy": False,
                    "per_target": {"old_log_probs": np.full(int(batch.cu_targets[-1]), -6.0)},
                    "global_batch_size": size,
                    "mini_batch_size": size,
                    "epochs": 1,
                    "seed": 0,
                    "dataloader_kwargs": {"shuffle": False},
                }
                run = worker.train_mini_batch
            else:
                options |= {"calculate_entropy": phase == OLD_LOG_PROB, "compute_loss": False}
                run = worker.infer_batch
            assert phase in (OLD_LOG_PROB, REF, UPDATE)
            data = batch.tensordict(**options)
            measured = Measurement(index, repeat, phase, data_rank, Times(0.0, 0.0), len(rows), batch.num_tokens)
            torch.distributed.barrier()
            with _observed(worker, measured, with_entropy=phase == OLD_LOG_PROB):
                start = _now()
                run(data)
                measured.times = _now().minus(start)
            found.append(measured)
        return found


def _engine_sizes(layout: ClusterLayout) -> dict[str, Any]:
    """veRL's names of the parallel sizes."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.tensor > 1,
    }


@contextmanager
def _observed(worker: Any, measured: Measurement, *, with_entropy: bool) -> Iterator[None]:
    """Record micro-batches, calls and the optimizer's time of a worker's call."""
    import torch

    engine = worker.engine
    run_batch, optimizer_step = engine.forward_backward_batch, engine.optimizer_step
    begun: list[tuple[Amounts, bool, Times]] = []

    def begins(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        begun.append((_amounts(kwargs), torch.is_grad_enabled(), _now()))

    def called(*args: Any, **kwargs: Any) -> Any:
        begun.clear()
        output = run_batch(*args, **kwargs)
        measured.calls += 1
        measured.micro_batches += [(amounts, training) for amounts, training, _ in begun]
        for (amounts, training, at), (_, next_training, next_at) in itertools.pairwise(begun):
            if training == next_training:  # else a schedule ended in between
                measured.cycles.append(Cycle(amounts, training, with_entropy, next_at.minus(at)))
        return output

    def stepped(*args: Any, **kwargs: Any) -> Any:
        start = _now()
        output = optimizer_step(*args, **kwargs)
        took = _now().minus(start)
        measured.optimizer = Times(measured.optimizer.wall + took.wall, measured.optimizer.cpu + took.cpu)
        return output

    hook = engine.module[0].register_forward_pre_hook(begins, with_kwargs=True)
    engine.forward_backward_batch, engine.optimizer_step = called, stepped
    try:
        yield
    finally:
        hook.remove()
        del engine.forward_backward_batch, engine.optimizer_step


def _amounts(kwargs: dict[str, Any]) -> Amounts:
    """Of the micro-batch whose forward begins."""
    from psrl.runtime.session import active_micro_batch

    bound = active_micro_batch()
    if bound is not None:
        return micro_batch_amounts(bound.plan)
    lengths = kwargs["packed_seq_params"].cu_seqlens_q.diff().tolist()
    return Amounts(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), sum(lengths), len(lengths), 0)


def _now() -> Times:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Times(time.perf_counter(), time.process_time())


def main(folder: Path) -> None:
    import torch

    from psrl.integrations.verl import platform
    from psrl.integrations.verl.local.worker import init_local_rank

    platform.install()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    init_local_rank(rank, world, str(folder / "store"))
    job: Job = pickle.loads((folder / "job.pkl").read_bytes())
    found = _Rank(job).run()
    (folder / f"result.{rank}").write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Unpickled records belong to the module under its importable name.
    from benchmarks.measured_ranks import main as _main

    _main(Path(sys.argv[1]))
