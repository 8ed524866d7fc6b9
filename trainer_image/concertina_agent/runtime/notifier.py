"""Notification of tasks that wait for a change."""

from __future__ import annotations

import asyncio


class Notifier:
    """Counter of changes that tasks wait for.

    A change is not lost if it happens before the task begins to wait, because the task passes the last count that it
    knows.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, count: int, timeout: float) -> int:
        """Wait until the counter is higher than `count`, but at most `timeout` seconds, and return the counter."""
        if self.count == count:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            await asyncio.wait([future], timeout=timeout)
            self._waiting.discard(future)
        return self.count
