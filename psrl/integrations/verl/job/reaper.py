"""Ends what a job leaves behind when its driver is killed.

Ray ends its workers then, but not the processes that they started (Megatron's checkpoint writer starts some), and its
own agents stay for a while. A small process, started by the driver and in a session of its own, notes the driver's
descendants while it lives, and ends those that are still there a while after it has gone. Linux only, as psrl is;
standard library only, since it runs as a script: ``reaper.py DRIVER GRACE [PID:STARTED ...]``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

GRACE_SECONDS = 10.0
"""For Ray to end a job by itself."""
_LOOK_SECONDS = 1.0

Processes = dict[int, tuple[int, str]]
"""Parent and start time (clock ticks since boot), by process id."""


@contextlib.contextmanager
def reap_after_this_process(grace: float = GRACE_SECONDS) -> Iterator[IO[bytes]]:
    """While inside, a watcher stands by. It acts when this process ends, however it ends, or leaves the block.

    Args:
        grace: seconds for the job's processes to end by themselves.

    Yields:
        A pipe to the watcher: for every byte it looks at once, else every second.
    """
    driver = os.getpid()
    # Listed here: the watcher's first look may come after the job's first processes.
    earlier = [f"{pid}:{started}" for pid, started in descendants(driver, list_processes()).items()]
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(driver), str(grace), *earlier],
        bufsize=0,
        stdin=subprocess.PIPE,  # closed by the kernel, whatever ends this process
        start_new_session=True,  # a signal to the driver's group does not end it
    )
    assert watcher.stdin is not None
    try:
        yield watcher.stdin
    finally:
        watcher.stdin.close()


def list_processes() -> Processes:
    """Of this machine, zombies left out."""
    found: Processes = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it ended while we looked
                # After the command's name, which may contain anything, in brackets: state, parent, ...
                values = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if values[0] != "Z":
                    found[int(entry)] = (int(values[1]), values[19])
    return found


def descendants(root: int, processes: Processes) -> dict[int, str]:
    """Start times by id; without ``root``."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found[pid] = processes[pid][1]
                waiting.append(pid)
    return found


def watch(driver: int, stdin: int, grace: float, earlier: dict[int, str]) -> int:
    """Wait for the end of the driver or of ``stdin``, then for the job's processes, then end them; returns how many.

    Args:
        driver: this process's parent.
        grace: seconds that they have.
        earlier: descendants that the driver had before the job: start times by id.
    """
    known: dict[int, str] = {}
    is_over = False
    while not is_over:
        readable, _, _ = select.select([stdin], [], [], _LOOK_SECONDS)
        # The parent too: a fork of the driver could hold the other end of the pipe open.
        is_over = bool(readable and not os.read(stdin, 1)) or os.getppid() != driver
        known |= descendants(driver, list_processes())
    known = {pid: started for pid, started in known.items() if earlier.get(pid) != started}
    left = _still_there(known)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        known |= left
        left = _still_there(known)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def _still_there(known: dict[int, str]) -> dict[int, str]:
    """Those that still run, and their descendants. An id whose start time is another belongs to another process."""
    processes = list_processes()
    left: dict[int, str] = {}
    for pid, started in known.items():
        if pid in processes and processes[pid][1] == started:
            left[pid] = started
            left |= descendants(pid, processes)
    left.pop(os.getpid(), None)
    return left


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    others = {int(pid): started for pid, started in (value.split(":") for value in sys.argv[3:])}
    ended = watch(int(sys.argv[1]), sys.stdin.fileno(), float(sys.argv[2]), others)
    if ended:
        print(f"psrl: ended {ended} processes that the job left behind", file=sys.stderr, flush=True)
