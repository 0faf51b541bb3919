"""Blocking calls off the event loop, which are never left running behind their caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_blocking(call: Callable[[], T], executor: Executor | None = None) -> T:
    """Run a blocking call in a thread.

    A thread cannot be stopped: when the caller is cancelled, it still waits until the call has ended, and is cancelled
    then. What the caller does next, such as closing the object that the call works on, never runs beside the call.

    Args:
        executor: None: the event loop's own threads.

    Raises:
        CancelledError: the caller was cancelled. The call has ended; its result or error is dropped.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as cancelled:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()  # looked at, or asyncio reports it as never retrieved
        raise cancelled
