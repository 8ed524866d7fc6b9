"""Limit on the number of operations at a time, shared fairly: many requests of one caller do not delay other callers.

Each caller (a key) belongs to a group of callers (a lane), and the lanes get slots in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class _Lane:
    """Waiting requests of the callers (keys) in one group of callers (the lane).

    The first key gets up to `a_turn` slots, and then the next key gets its turn.
    """

    def __init__(self, a_turn: int) -> None:
        self._a_turn = a_turn
        self._remaining = a_turn
        self.waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def next(self) -> asyncio.Future[None]:
        key, queue = next(iter(self.waiting.items()))
        granted = queue.popleft()
        self._remaining -= not granted.cancelled()
        if not queue:
            del self.waiting[key]
        elif not self._remaining:
            self.waiting.move_to_end(key)
        if not queue or not self._remaining:
            self._remaining = self._a_turn
        return granted


class FairLimiter:
    """Limiter that grants at most `slots` slots at a time.

    A key stands for a caller, and a lane for a group of callers. When requests have to wait, the lanes get one slot
    each in turn. Within a lane, the keys get up to `a_turn` slots each in turn, regardless of the number of their
    requests. A caller with many requests therefore delays only its own requests.
    """

    def __init__(self, slots: int, a_turn: int = 1) -> None:
        self._free = slots
        self._a_turn = a_turn
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()
        """Lanes in which requests wait."""

    @asynccontextmanager
    async def turn(self, lane: Hashable, key: Hashable = None) -> AsyncIterator[bool]:
        """Hold a slot while the `async with` block runs, and yield whether the caller had to wait for the slot.

        Raises:
            asyncio.CancelledError: When the caller is cancelled while it waits. A slot that was already granted is
                released.
        """
        waits = not self._free or bool(self._lanes)
        if not waits:
            self._free -= 1
        else:
            granted = asyncio.get_running_loop().create_future()
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(self._a_turn)
            self._lanes[lane].waiting.setdefault(key, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._grant_next()
                raise
        try:
            yield waits
        finally:
            self._grant_next()

    def _grant_next(self) -> None:
        while self._lanes:
            name, lane = self._lanes.popitem(last=False)
            granted = lane.next()
            if lane.waiting:
                self._lanes[name] = lane  # The lane is moved behind all other lanes.
            if not granted.done():  # Otherwise, the caller was cancelled.
                granted.set_result(None)
                return
        self._free += 1
