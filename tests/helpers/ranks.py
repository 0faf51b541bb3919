"""Several gloo processes on the loopback device, kept for many jobs, with a time limit that nothing outlives.

A pool owns its processes: it ends them, and no others, when a job fails or takes too long, and then says of every rank
what it raised or where it stood.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0
"""What the other ranks get to finish or fail by themselves when one has failed."""
PRELOAD = ["tests.helpers.parallel", "tests.helpers", "psrl.integrations.verl.local.worker"]
START_SECONDS = 900.0


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time."""


class RankPool:
    """``size`` processes of one process group. ``run`` starts them when needed; ``close`` ends them."""

    def __init__(self, size: int, folder: str | Path) -> None:
        self.size, self._folder = size, Path(folder)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._num_starts = 0

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 900.0) -> list[Any]:
        """Call ``function(*args)`` on every rank; returns what each returned.

        Args:
            function: module-level, so that the ranks can import it.
            seconds: time limit for all ranks together, start-up not counted.

        Raises:
            RankError: names the ranks that raised, died, or were still running, and where they stood.
        """
        if not self._processes:
            self._start()
        payload = _dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            for rank in self._ready(left, answers):
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) < self.size or not all(ok for ok, _ in answers.values()):
            raise RankError(self._fail(answers, seconds))
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End this pool's processes, at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    # --------------------------------------------------------------------------------------------------- inside
    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # one process imports what all need
        context.set_forkserver_preload(PRELOAD)
        self._num_starts += 1
        store = self._folder / f"store{self._num_starts}"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, str(store), str(self._log(rank)), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in range(self.size):
            if not self._pipes[rank].poll(START_SECONDS):
                raise RankError(self._fail({}, START_SECONDS))
            self._receive(rank)

    def _log(self, rank: int) -> Path:
        return self._folder / f"start{self._num_starts}.rank{rank}.log"

    def _ready(self, seconds: float, answers: dict[int, Any]) -> list[int]:
        pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
        return [pipes[pipe] for pipe in wait(list(pipes), timeout=seconds)]  # pyright: ignore[reportArgumentType]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return _loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5.0)
            return False, f"died with exit code {self._processes[rank].exitcode}"

    def _fail(self, answers: dict[int, tuple[bool, Any]], seconds: float) -> str:
        """End the pool; what every rank did."""
        lines = [f"{self.size} ranks, limit {seconds:.0f} s:"]
        for rank, process in enumerate(self._processes):
            if rank in answers:
                ok, value = answers[rank]
                lines.append(f"--- rank {rank}: " + ("finished" if ok else str(value)))
                continue
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
            lines.append(f"--- rank {rank}: still running; end of its log:\n{_tail(self._log(rank))}")
        self.close()
        return "\n".join(lines)


def _tail(log: Path, num_lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else "(has not started)"


def _dumps(value: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _loads(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(rank: int, size: int, store: str, log: str, pipe: Connection) -> None:
    """Body of a rank: jobs until the pipe closes."""
    gc.freeze()  # what was imported is for good: a collection, of which every job has several, need not walk it
    stream = open(log, "w", buffering=1)  # noqa: SIM115  open as long as the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    pipe.send_bytes(_dumps((True, None)))
    while True:
        try:
            function, args = _loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_dumps(answer))
