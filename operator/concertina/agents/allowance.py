"""Limit on the processor time that the operator spends on messages from the agents of one namespace.

Decision "CPU time limit for agent messages of a namespace" gives the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from concertina_protocol.log import log_event

SHARE = 0.1
"""Share of the event loop's time for the agents of one namespace: 0.1 s of processor time per second.

A thousand jobs that train need half of it.
"""
SAVED_SECONDS = 10.0
"""Seconds for which a namespace can save up unused time.

The agents of many jobs that start together all report at the same time.
"""
LINE_SECONDS = 0.00003
"""Seconds charged for receiving a line, in addition to the measured time for handling it."""
HOLD_SECONDS = 0.002
"""Seconds of processor time after which the lines of a namespace let the event loop do other work."""

T = TypeVar("T")
LOG_SECONDS, LOGGED_SECONDS = 60.0, 5.0
"""Period in seconds, and the total wait within a period after which the namespace is logged once."""


class Allowance:
    """Budget of processor time for the lines that the agents of one namespace send.

    The time to handle a line is charged to the budget, and the next line waits until the budget covers that time. Lines
    are handled in the order in which they arrive. Agents of one namespace wait for each other, but not for agents of
    other namespaces.
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
        """Waiting lines with the futures for their results, the oldest first."""
        self._serving: asyncio.Task[None] | None = None
        """Task that handles the waiting lines; None if no line waits."""
        self._paid_at = self._clock() - SAVED_SECONDS
        """Monotonic time at which all charged costs are covered."""
        self._held_seconds = 0.0
        """Processor time used since the lines last let the event loop do other work."""
        self._waits_since = self._clock()
        self._waited_seconds = 0.0

    @property
    def untouched(self) -> bool:
        """True if the budget has its initial size.

        Such an object can be dropped to save memory: a new object for the same namespace would have the same budget.
        """
        return self._paid_at <= self._clock() - SAVED_SECONDS

    async def handle(self, line: Callable[[], T]) -> T:
        """Handle one line when its turn comes, charge its cost, and return the result.

        Args:
            line: Function that reads and handles the line in the event loop. If no other line waits, the function is
                called at once.
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
        """Handle the waiting lines, for at most HOLD_SECONDS, and then let the event loop run other tasks.

        While a thousand jobs start, the other tasks take milliseconds each time. If this task handled only one line at
        a time, lines would arrive faster than they are handled.
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
        if result.done():  # the stream was closed while the line waited
            return
        try:
            result.set_result(self._charged(line))
        except Exception as error:
            result.set_exception(error)
            # if the stream is cancelled now, nothing reads the exception, and asyncio would log that
            result.exception()

    def _charged(self, line: Callable[[], T]) -> T:
        begun = self._processor_seconds()
        try:
            return line()
        finally:
            spent_seconds = LINE_SECONDS + self._processor_seconds() - begun
            self._held_seconds += spent_seconds
            self._paid_at = max(self._paid_at, self._clock() - SAVED_SECONDS) + spent_seconds / SHARE

    def _log_wait(self, seconds: float) -> None:
        """Log that lines of this namespace have waited for a long time.

        No metric shows this wait, because no metric has the namespace as a label.
        """
        if self._clock() - self._waits_since >= LOG_SECONDS:
            self._waits_since, self._waited_seconds = self._clock(), 0.0
        before = self._waited_seconds
        self._waited_seconds += seconds
        if before < LOGGED_SECONDS <= self._waited_seconds:
            log_event("agents_held_back", namespace=self._namespace, seconds=round(self._waited_seconds, 1))
