"""Work by keys, in a queue in which a burst of additions leads to one more run."""

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
"""Largest number of passes under way.

One pass decides at a time. The other passes wait, mostly for status writes, of which half as many are under way.
"""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 30.0
"""First and longest delay in seconds before a key whose work failed is tried again."""


@dataclass
class _Entry:
    """State of one key."""

    task: asyncio.Task[None] | None = None
    wanted_at: float | None = None
    """Time since which the key waits for a run, or None when it does not wait."""
    begun_at: float | None = None
    """Start of the current run."""
    last_begun: float = -math.inf
    """Start of the last run."""
    forgotten: bool = False
    """Whether the key was forgotten during its run. Then the result of the run is ignored."""
    timer: asyncio.TimerHandle | None = None
    failures: int = 0
    """Number of consecutive failures.

    While it is not 0, only the timer starts the next run: a key that fails is not run for every event.
    """

    def want(self) -> None:
        """Mark the key as waiting for a run."""
        if self.wanted_at is None:
            self.wanted_at = time.perf_counter()
            metrics.QUEUE_ADDS.inc()


class KeyedQueue:
    """Queue that calls `work(key)` for every key that was added.

    `work` returns the number of seconds after which the key is due again even if it is not added, or None. A key whose
    work raises is tried again with back-off and does not delay other keys. When more keys wait than there are workers,
    they take turns by `lane(key)`: a lane with a thousand keys does not delay other lanes.
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
        """Start to run keys. Earlier additions are remembered."""
        self._open = True
        for key in list(self._entries):
            self.add(key)

    def add(self, key: str) -> None:
        """Run the key as soon as a worker is free."""
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
        """Run the key after `seconds` at the latest, and earlier when it is due earlier."""
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
        """Run the key as soon as `seconds` have passed since the start of its last run."""
        entry = self._entries.get(key)
        remaining_seconds = entry.last_begun + seconds - time.perf_counter() if entry else 0.0
        if remaining_seconds > 0:
            self.add_within(key, remaining_seconds)
        else:
            self.add(key)

    def forget(self, key: str) -> None:
        """Cancel further runs of the key until it is added again."""
        if entry := self._entries.get(key):
            entry.wanted_at, entry.forgotten = None, True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            if entry.task is None:
                del self._entries[key]

    async def close(self) -> None:
        """Stop, and cancel all runs."""
        self._closed = True
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for key in list(self._entries):
            self.forget(key)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_gauges(self) -> None:
        """Set the metrics of keys that wait and that run now."""
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
                    if entry.wanted_at is not None:  # None: the key was forgotten meanwhile
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
            log.exception("the pass of job %s failed; it is tried again in %.1f s", key, recheck)
        else:
            entry.failures = 0
            (metrics.SUCCESSES if recheck is None else metrics.REQUEUES).inc()
        finally:
            entry.begun_at, took = None, time.perf_counter() - begun
            metrics.RECONCILE_SECONDS.observe(took)
            metrics.WORK_SECONDS.observe(took)
        return recheck
