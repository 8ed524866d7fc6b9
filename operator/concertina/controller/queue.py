"""Work by keys: a queue in which a burst of additions folds into one more run."""

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
"""Passes under way at once. One decides at a time; the others wait, for the write of a status above all, of which
half as many are under way."""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 30.0
"""Until a key whose work raised is tried again."""


@dataclass
class _Entry:
    task: asyncio.Task[None] | None = None
    wanted_at: float | None = None
    """Since when it waits for a run; None: it does not."""
    begun_at: float | None = None
    """Of the run under way."""
    last_begun: float = -math.inf
    """Of the last run."""
    forgotten: bool = False
    """While its task runs: nothing follows from that."""
    timer: asyncio.TimerHandle | None = None
    failures: int = 0
    """In a row. While there are any, the timer alone brings the next run: what fails is not run for every event."""

    def want(self) -> None:
        if self.wanted_at is None:
            self.wanted_at = time.perf_counter()
            metrics.QUEUE_ADDS.inc()


class KeyedQueue:
    """Calls `work(key)` for every key that was added. It returns the seconds after which the key is due again even if
    nobody adds it, or None. A key whose work raises is tried again with back-off and delays no other key. Where more
    keys wait than there are workers, they take turns by `lane(key)`: one with a thousand keys delays no other lane."""

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
        """Until then additions are only remembered."""
        self._open = True
        for key in list(self._entries):
            self.add(key)

    def add(self, key: str) -> None:
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
        """Due after `seconds` at the latest; what is due earlier stays so."""
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
        """Due as soon as its last run was begun so long ago."""
        entry = self._entries.get(key)
        left = entry.last_begun + seconds - time.perf_counter() if entry else 0.0
        if left > 0:
            self.add_within(key, left)
        else:
            self.add(key)

    def forget(self, key: str) -> None:
        """No further run, until it is added again."""
        if entry := self._entries.get(key):
            entry.wanted_at, entry.forgotten = None, True
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
            if entry.task is None:
                del self._entries[key]

    async def close(self) -> None:
        """Stop, cancelling what runs."""
        self._closed = True
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for key in list(self._entries):
            self.forget(key)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def set_gauges(self) -> None:
        """The metrics of what waits and what runs now."""
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
                    if entry.wanted_at is not None:  # else it was forgotten meanwhile
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
