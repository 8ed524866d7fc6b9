"""Threads that end soon after their owner, and at the end of the interpreter."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Optional, TypeVar

LAST_SECONDS = 5.0
"""Seconds that the interpreter waits at its end for fetches in progress.

If a fetch ended later, its thread would abort the process.
"""
T = TypeVar("T")


class Threads:
    """Threads that do submitted work, in the order of submission.

    When the interpreter ends, work that has not begun is cancelled.
    """

    def __init__(self, count: int) -> None:
        self._waiting: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=_work, args=(self._waiting,), name="concertina-data", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        _live.add(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.put(functools.partial(_settle, future, work, self._ended))
        if self._ended.is_set():
            future.cancel()
        return future

    def end(self) -> None:
        """Stop the threads. Each thread finishes its present work, and queued work is cancelled.

        Queued work is cancelled rather than dropped, because other threads may be waiting for its result.
        """
        self._ended.set()
        for _ in self._threads:
            self._waiting.put(None)

    def __del__(self) -> None:
        self.end()

    def join(self, until: float) -> None:
        """Wait until the threads have ended, but no longer than until `until` (monotonic seconds)."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


_live: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    every, until = list(_live), time.monotonic() + LAST_SECONDS
    for threads in every:
        threads.end()
    for threads in every:
        threads.join(until)


def _work(waiting: queue.SimpleQueue[Optional[Callable[[], None]]]) -> None:
    while (task := waiting.get()) is not None:
        task()
        del task  # otherwise the waiting thread would keep its result and its owner alive


def _settle(future: Future[T], work: Callable[[], T], ended: threading.Event) -> None:
    if ended.is_set():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # `result` raises it in the caller's thread
        future.set_exception(error)
