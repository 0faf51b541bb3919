"""Which rank died: heartbeats through the store that the process group meets at.

A collective whose peer is gone ends with an error that names an address, or does not end. Here every rank writes a
heartbeat and reads those of the others, so that every rank exits with an error that names the one that is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from psrl.errors import PSRLError, RankError

EXIT_LOST = 70
"""Exit code of a rank that ends because another one is gone (EX_SOFTWARE)."""

_BEATS_TO_LIVE = 3
"""Missed heartbeats after which a rank counts as gone once something has failed."""


class RankWatch:
    """Heartbeats of this rank, and the watch over those of the others, in a thread of their own.

    The thread ends the process if a rank is gone or has failed, since the main thread may wait for it in a collective
    that nothing else ends.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        """
        Args:
            store: this rank's connection; a clone is used, so that a blocked call does not hold heartbeats up.
            timeout: seconds without a heartbeat after which a rank is given up.
        """
        self._store = PrefixStore("psrl_watch", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._interval = min(5.0, timeout / 10)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._done = threading.Event()
        self._names: dict[int, str] = {}
        self._thread = threading.Thread(target=self._watch, name="psrl-rank-watch", daemon=True)
        self._store.set(f"name/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})")
        self._store.set(f"state/{rank}", "0")
        self._store.wait([f"name/{other}" for other in range(world_size)], timedelta(seconds=timeout))
        for other in range(world_size):
            self._names[other] = self._store.get(f"name/{other}").decode()
        self._thread.start()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Run the training. An error in it reaches the other ranks; if it came from another rank's death, the error
        that is raised says so.

        Raises:
            RankError: another rank is gone or has failed.
        """
        try:
            yield
        except PSRLError as error:
            self._say(f"failed: {error}")
            raise
        except Exception as error:
            lost = self._find_lost()
            if lost is not None:
                raise RankError(lost) from error
            self._say(f"failed: {type(error).__name__}: {error}")
            raise
        else:
            self._say("done")
        finally:
            self._done.set()
            self._thread.join()

    # ------------------------------------------------------------------------------------------------------- inside
    def _watch(self) -> None:
        beat = 0
        while not self._done.wait(self._interval):
            beat += 1
            try:
                self._store.set(f"state/{self._rank}", str(beat))
                lost = self._lost(self._timeout)
            except (RuntimeError, dist.DistError) as error:  # pyright: ignore[reportAttributeAccessIssue]
                lost = f"the store of the process group is gone, and with it the node of rank 0: {_first_line(error)}"
            if lost is not None:
                print(f"psrl: error: {self._names[self._rank]}: {lost}", file=sys.stderr, flush=True)
                os._exit(EXIT_LOST)

    def _say(self, state: str) -> None:
        """Leave a last state; without a store there is nobody to tell."""
        self._done.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"state/{self._rank}", state)

    def _lost(self, limit: float) -> str | None:
        """What happened to the first rank that failed or was silent for ``limit`` seconds."""
        now = time.monotonic()
        others = [other for other in range(self._world_size) if other != self._rank]
        states = self._store.multi_get([f"state/{other}" for other in others]) if others else []
        silent: str | None = None
        for other, state in zip(others, states, strict=True):
            if state.startswith(b"failed: "):
                return f"{self._names[other]} {state.decode()}"
            if state == b"done":
                continue
            if self._seen.get(other, (b"", 0.0))[0] != state:
                self._seen[other] = (state, now)
            elif now - self._seen[other][1] > limit and silent is None:
                silent = f"{self._names[other]} is gone: no sign of it for {now - self._seen[other][1]:.0f} s"
        return silent

    def _find_lost(self) -> str | None:
        """Look for the reason of an error here, until every other rank had time for some heartbeats."""
        limit = _BEATS_TO_LIVE * self._interval
        deadline = time.monotonic() + 2 * limit
        while time.monotonic() < deadline:
            try:
                lost = self._lost(limit)
            except RuntimeError as error:
                return f"the store of the process group is gone, and with it the node of rank 0: {_first_line(error)}"
            if lost is not None:
                return lost
            time.sleep(self._interval / 2)
        return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
