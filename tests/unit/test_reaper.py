"""What a killed driver leaves behind is ended; what was there before it is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from psrl.integrations.verl.job.reaper import descendants, list_processes

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = """
import fcntl, subprocess, sys, termios, time
from psrl.integrations.verl.job.reaper import reap_after_this_process
sleeper = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
sleeper += "print(p.pid, flush=True); time.sleep(600)"
earlier = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with reap_after_this_process(grace=0.5) as watcher:
    job = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE, text=True)
    child = job.stdout.readline().strip()
    watcher.write(b"..")  # once the second is read, the look for the first is over
    while any(fcntl.ioctl(watcher, termios.FIONREAD, bytes(4))):
        time.sleep(0.01)
    print(earlier.pid, job.pid, child, flush=True)
    {then}
"""


def start(then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A driver whose watcher has looked, and the ids of a process that it had before, of one of its job, and of that
    one's child."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(then=then)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert driver.stdout is not None
    return driver, [int(word) for word in driver.stdout.readline().split()]


def wait_for_end(pids: list[int], seconds: float = 60.0) -> set[int]:
    """Those of ``pids`` that have not ended."""
    deadline = time.monotonic() + seconds
    while (left := set(pids) & list_processes().keys()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def check(driver: subprocess.Popen[str], earlier: int, job: list[int]) -> None:
    try:
        assert wait_for_end(job) == set()
        assert earlier in list_processes()
    finally:
        os.kill(earlier, signal.SIGKILL)
        driver.wait()
        driver.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_killed_driver_leaves_nothing():
    driver, (earlier, *job) = start("time.sleep(600)")
    assert set(job) <= descendants(driver.pid, list_processes()).keys()
    driver.kill()
    check(driver, earlier, job)


def test_a_child_whose_parent_died_first_goes_too():
    driver, (earlier, *job) = start("time.sleep(600)")
    os.kill(job[0], signal.SIGKILL)
    assert wait_for_end(job[:1]) == set()
    assert job[1] not in descendants(driver.pid, list_processes())  # nobody's child any more
    driver.kill()
    check(driver, earlier, job)


def test_a_driver_that_fails_leaves_nothing():
    driver, (earlier, *job) = start("raise SystemExit(3)")
    assert driver.wait() == 3
    check(driver, earlier, job)
