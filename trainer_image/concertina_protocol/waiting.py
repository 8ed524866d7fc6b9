"""Waiting for awaitables with a time limit, on asyncio.

The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Optional, TypeVar

T = TypeVar("T")


async def within(seconds: Optional[float], work: Awaitable[T]) -> T:
    """Return the result of `work`, and raise an error if it takes more than `seconds` seconds. None means no limit.

    asyncio.wait_for does the same, but before Python 3.12 it loses a cancellation that coincides with the end of the
    work. A caller that retries after errors would then never stop, and a connection that was just opened would stay
    open.

    Raises:
        asyncio.TimeoutError: If `work` takes longer. It has been cancelled and has ended before the error is raised.
        asyncio.CancelledError: If the caller is cancelled and the work has no result.
    """
    if seconds is None:
        return await work
    running = asyncio.ensure_future(work)
    cancelled: Optional[asyncio.CancelledError] = None
    try:
        await asyncio.wait({running}, timeout=seconds)
    except asyncio.CancelledError as error:
        cancelled = error
    late = not running.done()
    while not running.done():
        running.cancel()
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if running.cancelled() or running.exception() is not None:
            raise cancelled
        waiting = asyncio.current_task()
        assert waiting is not None
        waiting.cancel()  # takes effect at the caller's next wait, so the caller can close the result
    elif late and running.cancelled():
        raise asyncio.TimeoutError
    return running.result()


async def together(*works: Awaitable[T]) -> list[T]:
    """Return the results of all `works`, in order.

    If one of the works fails, all others are cancelled. When they have ended, the error is raised.
    """
    running = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for future in running:
            future.cancel()
        await asyncio.wait(running)
        errors = [future.exception() for future in running if not future.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in running]
