"""Elapsed time as the user sees it, and the processor time of this process, which other processes do not disturb."""

from __future__ import annotations

import time
from typing import NamedTuple


class Seconds(NamedTuple):
    wall: float = 0.0
    cpu: float = 0.0
    """Over all threads."""

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def minus(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())
