"""Cancellation of the asyncio tasks of a pod, repeated until all of them have ended."""

import asyncio
from typing import Any

_AGAIN = 0.2  # seconds


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the given tasks repeatedly until they have ended.

    A single cancellation is not enough. asyncio.gather() loses a cancellation that arrives when one of its own tasks
    fails, and a caller that retries after such a failure does not notice the cancellation.
    """
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_AGAIN)
