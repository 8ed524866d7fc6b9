"""Queue of keys (uids of jobs) whose work must run.

If a key is added many times within a short time, its work runs once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from concertina import backoff, metrics
from concertina.turns import FairLimiter

log = logging.getLogger(__name__)
WORKERS = 32
"""Largest number of planning passes at a time.

Only one pass makes decisions at a time. Most of the other passes wait for status writes, of which half as many run at a
time.
"""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 30.0
"""Shortest and longest delay in seconds before a key whose work failed is tried again."""


@dataclass
class _Entry:
    """State of one key in the queue: whether its work waits, runs or has failed."""

    task: asyncio.Task[None] | None = None
    wanted_at: float | None = None
    """Monotonic time since which the key has waited for a run; None if it does not wait."""
    begun_at: float | None = None
    """Monotonic time at which the current run began; None if the key does not run."""
    last_begun: float = -math.inf
    """Monotonic time at which the last run began."""
    forgotten: bool = False
    """True if the key was removed during its run, so that the result of the run is ignored."""
    timer: asyncio.TimerHandle | None = None
    failures: int = 0
    """Number of consecutive failed runs.

    After a failure, only a timer starts the next run, so that new events do not run a failing key immediately.
    """

    def want(self) -> None:
        """Record that the work for the key must run: now, or after its current run."""
        if self.wanted_at is None:
            self.wanted_at = time.perf_counter()
            metrics.QUEUE_ADDS.inc()


class KeyedQueue:
    """Queue that calls `work(key)` for each added key.

    `work` returns the seconds after which it must be called again even if the key is not added again, or None. If
    `work` raises an exception, the queue calls it again after a growing delay, and other keys are not delayed. Each key
    belongs to a lane (`lane(key)`). If more keys wait than there are worker tasks, the lanes take turns. A lane with a
    thousand keys therefore does not delay the keys of other lanes.
    """

    def __init__(
        self,
        work: Callable[[str], Awaitable[float | None]],
        lane: Callable[[str], Hashable] = lambda key: key,
        workers: int = WORKERS,
    ) -> None:
        self._work = work
        self._lane = lane
        self._workers = FairLimiter(workers)
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._open = False

    def start(self) -> None:
        """Start the worker tasks, which call `work` for keys that are in the queue now or are added later."""
        self._open = True
        for key in list(self._entries):
            self.add(key)

    def add(self, key: str) -> None:
        """Call `work` for the key as soon as a worker task is free."""
        entry = self._entries.setdefault(key, _Entry())
        entry.forgotten = False
        if not self._open or self._closed:
            return
        if entry.task is not None:
            entry.want()
            return
        if entry.timer is not None:
            if entry.failures:
                return
            entry.timer.cancel()
            entry.timer = None
        entry.want()
        entry.task = asyncio.create_task(self._run(key, entry), name=f"job {key}")

    def add_within(self, key: str, seconds: float) -> None:
        """Call `work` for the key after at most `seconds` seconds."""
        entry = self._entries.setdefault(key, _Entry())
        entry.forgotten = False
        if not self._open or self._closed or entry.wanted_at is not None:
            return
        loop = asyncio.get_running_loop()
        if entry.timer is not None:
            if entry.failures or entry.timer.when() <= loop.time() + seconds:
                return
            entry.timer.cancel()
        entry.timer = loop.call_later(seconds, self._due, key)

    def add_after(self, key: str, seconds: float) -> None:
        """Call `work` for the key once `seconds` seconds have passed since its last run began."""
        entry = self._entries.get(key)
        remaining_seconds = entry.last_begun + seconds - time.perf_counter() if entry else 0.0
        if remaining_seconds > 0:
            self.add_within(key, remaining_seconds)
        else:
            self.add(key)

    def forget(self, key: str) -> None:
        """Remove the key. `work` is not called for it again unless the key is added again."""
        if entry := self._entries.get(key):
            entry.wanted_at, entry.forgotten = None, True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            if entry.task is None:
                del self._entries[key]

    async def close(self) -> None:
        """Stop the queue and cancel all calls of `work` in progress."""
        self._closed = True
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for key in list(self._entries):
            self.forget(key)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_gauges(self) -> None:
        """Set the gauges for the number of waiting keys and of running keys."""
        now, entries = time.perf_counter(), self._entries.values()
        under_way = [now - entry.begun_at for entry in entries if entry.begun_at is not None]
        metrics.QUEUE_DEPTH.set(sum(entry.wanted_at is not None for entry in entries))
        metrics.ACTIVE_WORKERS.set(len(under_way))
        metrics.UNFINISHED_SECONDS.set(sum(under_way))
        metrics.LONGEST_SECONDS.set(max(under_way, default=0.0))

    def _due(self, key: str) -> None:
        if entry := self._entries.get(key):
            entry.timer = None
            self.add(key)

    async def _run(self, key: str, entry: _Entry) -> None:
        recheck: float | None = None
        try:
            while entry.wanted_at is not None and not self._closed:
                async with self._workers.turn(self._lane(key)):
                    if entry.wanted_at is not None:  # None if the key was removed meanwhile
                        recheck = await self._once(key, entry, entry.wanted_at)
        finally:
            entry.task = None
        if recheck is not None and not entry.forgotten:
            self.add_within(key, recheck)
        elif entry.timer is None:
            self._entries.pop(key, None)

    async def _once(self, key: str, entry: _Entry, wanted_at: float) -> float | None:
        entry.wanted_at, begun = None, time.perf_counter()
        entry.begun_at = entry.last_begun = begun
        metrics.QUEUE_SECONDS.observe(begun - wanted_at)
        try:
            recheck = await self._work(key)
        except Exception:
            recheck = backoff.seconds(entry.failures, FIRST_SECONDS, LONGEST_SECONDS)
            entry.failures += 1
            entry.wanted_at = None
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            for counter in (metrics.ERRORS, metrics.RECONCILE_ERRORS, metrics.QUEUE_RETRIES):
                counter.inc()
            log.exception("the reconciliation of job %s failed; it is retried in %.1f s", key, recheck)
        else:
            entry.failures = 0
            (metrics.SUCCESSES if recheck is None else metrics.REQUEUES).inc()
        finally:
            entry.begun_at, took = None, time.perf_counter() - begun
            metrics.RECONCILE_SECONDS.observe(took)
            metrics.WORK_SECONDS.observe(took)
        return recheck
