"""The local processes of a replay under model or data parallelism: started, watched, and ended by the first one.

Every process runs the whole replay on its share of the rows; rank 0 reports and writes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from psrl.errors import PSRLError, RankError
from psrl.integrations.verl.compat import quiet_upstream

GRACE_SECONDS = 2.0
"""What ranks get to say why they failed, once one has: the one that failed first need not be heard first."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the replay."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, on every rank. Collective."""
        if self.size == 1:
            return [value]
        import torch

        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values


def run_on_ranks(size: int, function: Callable[..., int], *args: Any) -> int:
    """Call ``function(*args, ranks)`` in ``size`` new processes with one process group; returns what rank 0 returns.

    The processes are this one's children, and end with it, with the first failure, and on an interrupt.

    Args:
        function: module-level, so that the processes can import it.

    Raises:
        PSRLError: what a rank raised, if it is one of psrl's.
        RankError: a rank raised another error (its traceback is on stderr) or died; names the rank.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="psrl_ranks_") as folder:
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                store = str(Path(folder) / "store")
                process = context.Process(target=_serve, args=(Ranks(rank, size), store, theirs, function, args))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _result(processes, pipes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _result(processes: list[Any], pipes: list[Connection]) -> int:
    answers: dict[int, tuple[str, Any]] = {}
    deadline: float | None = None
    while len(answers) < len(pipes) and (deadline is None or time.monotonic() < deadline):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for pipe in wait(list(open_pipes), timeout=left):
            rank = open_pipes[pipe]  # pyright: ignore[reportArgumentType]
            answers[rank] = _receive(processes[rank], pipes[rank])
            if answers[rank][0] != "done" and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
    _raise_first_failure(answers)
    return answers[0][1]


def _receive(process: Any, pipe: Connection) -> tuple[str, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5.0)
        return "died", process.exitcode


def _raise_first_failure(answers: Mapping[int, tuple[str, Any]]) -> None:
    """psrl's own errors say most; a death says more than what other ranks make of it (a lost connection)."""
    for kind in ("error", "died", "failed"):
        for rank, (outcome, value) in sorted(answers.items()):
            if outcome != kind:
                continue
            if kind == "error":
                raise value
            what = f"died (exit code {value})" if kind == "died" else f"failed: {value}"
            raise RankError(f"rank {rank} of {len(answers)} {what}; the other ranks were ended")


def _end_with_parent() -> None:
    """A rank that waits for others in a collective would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(ranks: Ranks, store: str, pipe: Connection, function: Callable[..., int], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.size),
        "LOCAL_WORLD_SIZE": str(ranks.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: tuple[str, Any]
    try:
        with quiet_upstream():
            import torch.distributed as dist

            from psrl.integrations.verl.local.worker import init_local_rank

        init_local_rank(ranks.rank, ranks.size, store)
        answer = ("done", function(*args, ranks))
        dist.destroy_process_group()  # gloo's threads would abort the exit now and then
    except PSRLError as error:
        answer = ("error", error)
    except (KeyboardInterrupt, SystemExit):
        return
    except Exception as error:
        traceback.print_exc()
        answer = ("failed", f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
