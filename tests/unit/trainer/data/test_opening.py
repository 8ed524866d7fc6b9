"""Shards that are opened ahead of their use."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from concertina_data.opening import OpenShards
from concertina_data.threads import Threads


class Store:
    def __init__(self) -> None:
        self.away, self.asked = True, list[int]()
        self.answered = threading.Semaphore(0)

    def open(self, index: int) -> int:
        self.asked.append(index)
        self.answered.release()
        if self.away:
            raise OSError("it can't be reached")
        return index


def test_what_could_not_be_opened_ahead_of_its_use_is_tried_again_when_it_is_used() -> None:
    store = Store()
    shards = OpenShards([1] * 4, 4, store.open, Threads(1), 48)
    shards.expect(range(4))
    for _ in range(4):
        assert store.answered.acquire(timeout=60)
    with suppress(OSError):
        shards.get(3)  # the thread has settled the others by then
    store.away = False
    assert [shards.get(index) for index in range(4)] == [0, 1, 2, 3]
    assert shards.get(0) == 0
    assert sorted(store.asked[-4:]) == [0, 1, 2, 3], "and then no more"


def test_what_still_can_not_be_opened_is_raised() -> None:
    store = Store()
    shards = OpenShards([1], 4, store.open, Threads(1), 48)
    for _ in range(2):
        with pytest.raises(OSError, match="can't be reached"):
            shards.get(0)


def test_work_that_has_not_begun_when_the_threads_end_is_cancelled() -> None:
    """Otherwise a thread that waits for it would hold up the end of the interpreter."""
    threads, begun, may_end = Threads(1), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(60)

    present, waiting = threads.submit(work), threads.submit(work)
    assert begun.wait(60)
    threads.end()
    late = threads.submit(work)
    may_end.set()
    assert present.result(60)
    for future in (waiting, late):
        with pytest.raises(CancelledError):
            future.result(10)
