"""Threads that end soon after their owner, and at the end of the interpreter."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Optional, TypeVar

from concertina_state.errors import InvalidInput

LAST_SECONDS = 5.0
"""Seconds that the interpreter waits at its end for fetches in progress.

If a fetch ended later, its thread would abort the process.
"""
K = TypeVar("K")
T = TypeVar("T")
_making = threading.Lock()
"""Lock of `one_per_process`. It is held during a fork, so that no other thread holds it at that time.

A lock that another thread holds during a fork is never released in the forked process.
"""
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def one_per_process(make: Callable[[K], T]) -> Callable[[K], T]:
    """Decorate `make` so that a process has one result for each key, which all threads of the process share.

    A forked process makes a result of its own. It has none of its parent's threads, and the parent's result may contain
    locks that such a thread holds.
    """
    made: dict[tuple[int, K], T] = {}

    def one(key: K) -> T:
        with _making:
            process = os.getpid(), key
            if process not in made:
                made[process] = make(key)
            return made[process]

    return one


class Threads:
    """Threads that carry out submitted work in the order of submission.

    When the interpreter ends, work that has not begun is cancelled.
    """

    def __init__(self, count: int) -> None:
        self._process = os.getpid()
        self._waiting: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=_work, args=(self._waiting,), name="concertina-data", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        _live.add(self)

    def check(self) -> None:
        """Check that the threads belong to this process.

        Raises:
            InvalidInput: When this process was forked, because the forked process does not have these threads and would
                wait forever.
        """
        if self._process != os.getpid():
            raise InvalidInput(
                "these data were opened before this process was forked, and their threads are in the other process: "
                "open the data in the process that reads them."
            )

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do the work in a thread, and return its future result.

        Raises:
            InvalidInput: When this process was forked after the threads had been started.
        """
        self.check()
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
