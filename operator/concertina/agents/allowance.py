"""Limit of the event loop's time for the lines of one namespace's agents.

See the decision "A namespace's lines have a share of the event loop".
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from concertina_protocol.log import log_event

SHARE = 0.1
"""Share of the event loop for the agents of one namespace: 0.1 s of processor time in each second.

A thousand jobs that train need half of it.
"""
SAVED_SECONDS = 10.0
"""Number of seconds for which unused time is credited.

The agents of many jobs that start together all report at once.
"""
LINE_SECONDS = 0.00003
"""Time charged for receiving each line, in seconds, in addition to the measured time."""
HOLD_SECONDS = 0.002
"""Processor time in seconds after which a namespace's lines yield to everything else that is ready."""

T = TypeVar("T")
LOG_SECONDS, LOGGED_SECONDS = 60.0, 5.0
"""Period in seconds, and total wait in such a period after which the namespace is logged, once a period."""


class Allowance:
    """Charges each line its cost, and delays the next line until that cost is paid for.

    Lines take turns in the order in which they arrived. Agents of a namespace wait for each other, and agents of other
    namespaces do not wait for them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor_seconds: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        namespace: str = "",
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._sleep = sleep
        self._processor_seconds = processor_seconds
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        """Lines that wait for their turn, with the futures of their results, the oldest first."""
        self._serving: asyncio.Task[None] | None = None
        """Task that handles the lines that wait, while there are any."""
        self._paid_at = self._clock() - SAVED_SECONDS
        """Time at which everything spent so far is paid for."""
        self._held_seconds = 0.0
        """Processor time spent since these lines last yielded."""
        self._waits_since = self._clock()
        self._waited_seconds = 0.0

    @property
    def untouched(self) -> bool:
        """Whether the allowance is the same as a new one."""
        return self._paid_at <= self._clock() - SAVED_SECONDS

    async def handle(self, line: Callable[[], T]) -> T:
        """Handle one line when it is its turn, charge its cost, and return its result.

        Args:
            line: Reads and handles the line. It runs in the event loop, at once when no other line waits.
        """
        owes = self._paid_at > self._clock()
        if self._serving is None and not owes and self._held_seconds < HOLD_SECONDS:
            return self._charged(line)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((line, result))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await result

    async def _serve(self) -> None:
        """Handle the lines that wait, as many in one turn of the event loop as HOLD_SECONDS allows.

        A lock that passes from one stream to the next would handle one line in each turn. A turn takes milliseconds
        while a thousand jobs start, so their lines would come faster than they are handled.
        """
        try:
            while self._waiting:
                while (early_seconds := self._paid_at - self._clock()) > 0:
                    self._log_wait(early_seconds)
                    await self._sleep(early_seconds)
                self._held_seconds = 0.0
                while self._waiting and self._held_seconds < HOLD_SECONDS and self._paid_at <= self._clock():
                    self._resolve(*self._waiting.popleft())
                await self._sleep(0)
        finally:
            self._serving = None

    def _resolve(self, line: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        if result.done():  # cancelled: its stream was closed while the line waited
            return
        try:
            result.set_result(self._charged(line))
        except Exception as error:
            result.set_exception(error)
            result.exception()  # a stream that is cancelled now does not read it, and asyncio would log that

    def _charged(self, line: Callable[[], T]) -> T:
        begun = self._processor_seconds()
        try:
            return line()
        finally:
            spent_seconds = LINE_SECONDS + self._processor_seconds() - begun
            self._held_seconds += spent_seconds
            self._paid_at = max(self._paid_at, self._clock() - SAVED_SECONDS) + spent_seconds / SHARE

    def _log_wait(self, seconds: float) -> None:
        """Log the namespace when its lines have waited for long, because no metric names it."""
        if self._clock() - self._waits_since >= LOG_SECONDS:
            self._waits_since, self._waited_seconds = self._clock(), 0.0
        before = self._waited_seconds
        self._waited_seconds += seconds
        if before < LOGGED_SECONDS <= self._waited_seconds:
            log_event("agents_held_back", namespace=self._namespace, seconds=round(self._waited_seconds, 1))
