"""Waiting with an end. Standard library only, Python 3.9+."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Optional, TypeVar

T = TypeVar("T")


async def within(seconds: Optional[float], work: Awaitable[T]) -> T:
    """What the work gives. Raises asyncio.TimeoutError where that takes longer; then it was cancelled, and has ended.

    As asyncio.wait_for, which before Python 3.12 loses a cancellation that meets the end of the work: who tries again
    after errors would do so for ever, and what was just opened would stay open. `seconds`: None without an end."""
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
        waiting.cancel()  # where it waits next: what the work gives is its to close
    elif late and running.cancelled():
        raise asyncio.TimeoutError
    return running.result()


async def together(*works: Awaitable[T]) -> list[T]:
    """What each gives, in order. Where one fails, that is raised once the others were cancelled and have ended."""
    running = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running)
        errors = [each.exception() for each in running if not each.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    return [each.result() for each in running]
