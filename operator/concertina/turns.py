"""Slots that lanes share in turns, so that a lane with many requests does not delay the other lanes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class _Lane:
    """Keys that wait for slots.

    The first key has its turn: after `a_turn` slots, the next key follows.
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

    When callers request more, lanes are served one after the other with one slot each. Within a lane, keys are served
    with `a_turn` slots each, however many slots they wait for. A caller that requests many slots therefore delays only
    its own requests.
    """

    def __init__(self, slots: int, a_turn: int = 1) -> None:
        self._free = slots
        self._a_turn = a_turn
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()
        """Lanes in which a key waits."""

    @asynccontextmanager
    async def turn(self, lane: Hashable, key: Hashable = None) -> AsyncIterator[bool]:
        """Hold a slot for as long as the block runs.

        Yields whether the caller had to wait for the slot.

        Raises:
            asyncio.CancelledError: When the caller is cancelled while it waits. A slot that was already granted goes to
                the next caller.
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
                self._lanes[name] = lane  # Behind all other lanes.
            if not granted.done():  # Otherwise, the caller was cancelled.
                granted.set_result(None)
                return
        self._free += 1
