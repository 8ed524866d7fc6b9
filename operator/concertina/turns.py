"""Slots that are shared in turns: among lanes, so that one that wants much delays no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class _Lane:
    """Keys that wait. The first has its turn: so many slots, then the next one."""

    def __init__(self, a_turn: int) -> None:
        self._a_turn = a_turn
        self._left = a_turn
        self.waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def next(self) -> asyncio.Future[None]:
        key, queue = next(iter(self.waiting.items()))
        granted = queue.popleft()
        self._left -= not granted.cancelled()
        if not queue:
            del self.waiting[key]
        elif not self._left:
            self.waiting.move_to_end(key)
        if not queue or not self._left:
            self._left = self._a_turn
        return granted


class FairLimiter:
    """At most `slots` are taken at once. Where more are wanted, lanes are served one after the other with a slot each,
    and within a lane the keys with `a_turn` slots each, whatever the number that they wait for: whoever asks for many
    waits behind himself, not behind others."""

    def __init__(self, slots: int, a_turn: int = 1) -> None:
        self._free = slots
        self._a_turn = a_turn
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()
        """Those in which somebody waits."""

    @asynccontextmanager
    async def turn(self, lane: Hashable, key: Hashable = None) -> AsyncIterator[bool]:
        """A slot for as long as the block runs; whether it had to be waited for."""
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
                    self._pass_on()
                raise
        try:
            yield waits
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._lanes:
            name, lane = self._lanes.popitem(last=False)
            granted = lane.next()
            if lane.waiting:
                self._lanes[name] = lane  # behind all others
            if not granted.done():  # else cancelled
                granted.set_result(None)
                return
        self._free += 1
