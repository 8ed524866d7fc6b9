"""Slots that are shared in turns: among jobs, so that one that wants much delays no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `slots` are taken at once. Where more are wanted, keys are served one after the other, each with one slot
    a turn, whatever the number that it waits for: whoever asks for many waits behind himself, not behind others."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """A slot for as long as the block runs."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            granted = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            key, queue = self._waiting.popitem(last=False)
            granted = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind all others
            if not granted.done():  # else cancelled
                granted.set_result(None)
                return
        self._free += 1
