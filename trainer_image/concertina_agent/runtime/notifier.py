"""Notification of waiting tasks about changes."""

from __future__ import annotations

import asyncio


class Notifier:
    """Counter of changes for which any number of tasks can wait; no task misses the last change."""

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
        """Wait until there is a change after `count`, or the time is up, and return the new count."""
        if self.count == count:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            await asyncio.wait([future], timeout=timeout)
            self._waiting.discard(future)
        return self.count
