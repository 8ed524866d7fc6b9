"""How the tasks of a pod end."""

import asyncio
from typing import Any

_AGAIN = 0.2  # seconds


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them until they have ended.

    Once is not enough: asyncio.gather() forgets a cancellation that comes in the moment in which one of its own fails,
    and whoever tries again after such a failure never hears of it.
    """
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=_AGAIN)
