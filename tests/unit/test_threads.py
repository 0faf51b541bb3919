"""A blocking call outlives no caller: a cancelled one waits for its thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from psrl.threads import run_blocking


def test_result_and_error_are_the_calls():
    def fail():
        raise ValueError("of the call")

    async def run():
        with pytest.raises(ValueError, match="of the call"):
            await run_blocking(fail)
        return await run_blocking(lambda: threading.current_thread().name)

    assert asyncio.run(run()) != threading.current_thread().name


@pytest.mark.parametrize("num_cancels", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_waits_until_the_call_has_ended(num_cancels, fails):
    order, started, go_on, asyncio_errors = [], threading.Event(), threading.Event(), []

    def call():
        started.set()
        assert go_on.wait(60)
        order.append("call")
        if fails:
            raise ValueError("nobody is there to hear it")

    async def caller(executor):
        try:
            await run_blocking(call, executor)
        finally:
            order.append("clean-up")

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: asyncio_errors.append(context))
        with ThreadPoolExecutor(1) as executor:
            task = asyncio.ensure_future(caller(executor))
            await asyncio.to_thread(started.wait)
            for _ in range(num_cancels):
                task.cancel()
                await asyncio.sleep(0.01)
                assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert order == ["call", "clean-up"] and not asyncio_errors
