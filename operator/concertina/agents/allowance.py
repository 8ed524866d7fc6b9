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
"""Seconds of unused processor time that a namespace can save up.

When many jobs start together, all their agents report at the same time.
"""
LINE_SECONDS = 0.00003
"""Processor time in seconds that is charged for receiving a line, in addition to the measured time to process it."""
HOLD_SECONDS = 0.002
"""Processor time in seconds that a namespace's lines can use before other tasks of the event loop run."""

T = TypeVar("T")
LOG_SECONDS, LOGGED_SECONDS = 60.0, 5.0
"""Log limit for slow namespaces: a period in seconds, and the total seconds of waiting in it that cause a log line.

A namespace causes at most one log line per period.
"""


class Allowance:
    """Budget of processor time for the lines (messages) that the agents of one namespace send.

    The time to process a line is charged to the budget, and the next line waits until the budget covers that time.
    Lines are processed in the order in which they arrive. Lines of one namespace can delay each other, but not the
    lines of other namespaces.
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
        """Monotonic time from which the budget covers all charged time."""
        self._held_seconds = 0.0
        """Processor time in seconds that lines have used since other tasks of the event loop last ran."""
        self._waits_since = self._clock()
        self._waited_seconds = 0.0

    @property
    def untouched(self) -> bool:
        """True if the budget is unused, so that a new object for the same namespace would have the same budget.

        Such an object can be dropped to save memory.
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
        """Process waiting lines for at most HOLD_SECONDS, let other tasks of the event loop run, and repeat.

        While a thousand jobs start, the other tasks take milliseconds each time. If only one line were processed in
        between, lines would arrive faster than they are processed.
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
        """Add a wait of this namespace's lines to the total of the current period, and log a long total once.

        No metric shows this wait, because no metric has the namespace as a label.
        """
        if self._clock() - self._waits_since >= LOG_SECONDS:
            self._waits_since, self._waited_seconds = self._clock(), 0.0
        before = self._waited_seconds
        self._waited_seconds += seconds
        if before < LOGGED_SECONDS <= self._waited_seconds:
            log_event("agents_held_back", namespace=self._namespace, seconds=round(self._waited_seconds, 1))
