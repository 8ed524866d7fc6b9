"""Keyed queue: one run for each key at a time, bursts lead to one run, and failures affect only their key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from builders.until import until_async
from concertina.controller import queue as queue_module
from concertina.controller.queue import KeyedQueue


def started(work: Callable[[str], Awaitable[float | None]]) -> KeyedQueue:
    queue = KeyedQueue(work)
    queue.start()
    return queue


def test_a_burst_folds_into_one_more_run_and_runs_of_a_key_never_overlap() -> None:
    runs: Counter[str] = Counter()
    running: Counter[str] = Counter()
    overlapped = []
    gate = asyncio.Event()

    async def work(key: str) -> None:
        running[key] += 1
        overlapped.extend([key] if running[key] > 1 else [])
        runs[key] += 1
        await gate.wait()
        running[key] -= 1

    async def scenario() -> None:
        queue = started(work)
        queue.add("a")
        queue.add("b")
        await until_async(lambda: runs == {"a": 1, "b": 1}, "the runs", lambda: runs)
        for _ in range(100):
            queue.add("a")
        await asyncio.sleep(0)
        assert runs["a"] == 1
        gate.set()
        await until_async(lambda: runs["a"] == 2, "the runs", lambda: runs)
        await asyncio.sleep(0.05)
        assert runs == {"a": 2, "b": 1}
        assert not overlapped

    asyncio.run(scenario())


def test_additions_after_a_gap_fold_into_one_run_at_its_end_and_the_first_has_none() -> None:
    begun: list[float] = []

    async def work(key: str) -> float:
        begun.append(asyncio.get_running_loop().time())
        return 1e6

    async def scenario() -> None:
        queue = started(work)
        queue.add_after("a", 1e6)
        await until_async(lambda: len(begun) == 1, "the first run", lambda: begun)
        for _ in range(5):
            queue.add_after("a", 0.2)
            await asyncio.sleep(0.01)
        await until_async(lambda: len(begun) == 2, "the second run", lambda: begun)
        await asyncio.sleep(0.25)
        assert len(begun) == 2
        assert begun[1] - begun[0] >= 0.19
        queue.add_after("a", 1e6)
        queue.add("a")
        await until_async(lambda: len(begun) == 3, "a run without a gap", lambda: begun)
        await queue.close()

    asyncio.run(scenario())


def test_additions_before_the_start_wait_for_it() -> None:
    runs: list[str] = []

    async def work(key: str) -> None:
        runs.append(key)

    async def scenario() -> None:
        queue = KeyedQueue(work)
        queue.add("a")
        queue.add("a")
        await asyncio.sleep(0.02)
        assert runs == []
        queue.start()
        await until_async(lambda: runs == ["a"], "the runs", lambda: runs)

    asyncio.run(scenario())


def test_a_key_comes_back_after_what_its_work_returned_and_no_more_after_none() -> None:
    runs = 0

    async def work(_: str) -> float | None:
        nonlocal runs
        runs += 1
        return 0.01 if runs < 3 else None

    async def scenario() -> None:
        queue = started(work)
        queue.add("a")
        await until_async(lambda: runs == 3, "the runs", lambda: runs)
        await asyncio.sleep(0.05)
        assert runs == 3

    asyncio.run(scenario())


def test_the_earliest_of_several_delays_counts() -> None:
    runs = 0

    async def work(_: str) -> float | None:
        nonlocal runs
        runs += 1
        return 3600.0

    async def scenario() -> None:
        queue = started(work)
        queue.add("a")
        await until_async(lambda: runs == 1, "the runs", lambda: runs)
        queue.add_within("a", 7200)
        queue.add_within("a", 0.01)
        queue.add_within("a", 1800)
        await until_async(lambda: runs == 2, "the runs", lambda: runs)
        await queue.close()

    asyncio.run(scenario())


def test_work_that_raises_is_tried_again_and_delays_no_other_key() -> None:
    runs: Counter[str] = Counter()

    async def work(key: str) -> None:
        runs[key] += 1
        if key == "bad" and runs[key] < 3:
            raise RuntimeError("not yet")

    async def scenario() -> None:
        queue = started(work)
        queue.add("bad")
        queue.add("good")
        await until_async(lambda: runs["good"] == 1, "the runs", lambda: runs)
        assert runs["bad"] == 1
        await until_async(lambda: runs["bad"] == 3, "the runs", lambda: runs)

    asyncio.run(scenario())


def test_events_do_not_shorten_the_back_off_of_work_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "FIRST_SECONDS", 3600.0)
    monkeypatch.setattr(queue_module, "LONGEST_SECONDS", 3600.0)
    runs = 0

    async def work(_: str) -> None:
        nonlocal runs
        runs += 1
        queue.add("a")  # News arrives while the key runs, such as an agent's report.
        raise RuntimeError("always")

    async def scenario() -> None:
        queue.start()
        queue.add("a")
        await until_async(lambda: runs == 1, "the runs", lambda: runs)
        for _ in range(20):
            queue.add("a")
            queue.add_within("a", 0.001)
            await asyncio.sleep(0.002)
        assert runs == 1
        await queue.close()

    queue = KeyedQueue(work)
    asyncio.run(scenario())


def test_no_more_keys_are_worked_on_at_once_than_there_are_workers_and_lanes_take_turns() -> None:
    begun, gate = list[str](), asyncio.Event()

    async def work(key: str) -> None:
        begun.append(key)
        await gate.wait()
        await asyncio.sleep(0)

    async def scenario() -> None:
        queue = KeyedQueue(work, lane=lambda key: key[0], workers=4)
        queue.start()
        for number in range(1000):
            queue.add(f"a{number}")
        queue.add("b")
        await asyncio.sleep(0.01)
        assert begun == ["a0", "a1", "a2", "a3"]
        gate.set()
        await until_async(lambda: len(begun) == 1001, "all of them", lambda: len(begun))
        assert "b" in begun[:6]

    asyncio.run(scenario())


def test_a_key_that_is_forgotten_while_it_waits_for_a_worker_is_not_worked_on() -> None:
    begun, gate = list[str](), asyncio.Event()

    async def work(key: str) -> None:
        begun.append(key)
        await gate.wait()

    async def scenario() -> None:
        queue = KeyedQueue(work, workers=1)
        queue.start()
        for key in ("a", "b", "c"):
            queue.add(key)
        await asyncio.sleep(0)
        queue.forget("b")
        gate.set()
        await until_async(lambda: "c" in begun, "the last one", lambda: begun)
        assert begun == ["a", "c"]

    asyncio.run(scenario())


def test_a_forgotten_key_is_not_run_again() -> None:
    runs = 0

    async def work(_: str) -> float | None:
        nonlocal runs
        runs += 1
        return 0.02

    async def scenario() -> None:
        queue = started(work)
        queue.add("a")
        await until_async(lambda: runs >= 1, "a run", lambda: runs)
        queue.forget("a")
        before = runs
        await asyncio.sleep(0.1)
        assert runs == before

    asyncio.run(scenario())


def test_a_key_that_is_forgotten_during_its_run_or_before_is_not_run_again() -> None:
    runs = 0

    async def work(_: str) -> float | None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.01)
        return 0.01

    async def scenario() -> None:
        queue = started(work)
        queue.add("a")
        queue.forget("a")  # The key's task has not begun.
        await asyncio.sleep(0.05)
        assert runs == 0
        queue.add("a")
        await asyncio.sleep(0)
        queue.forget("a")
        await asyncio.sleep(0.05)
        assert runs == 1
        queue.add("a")
        await until_async(lambda: runs >= 3, "the runs", lambda: runs)
        await queue.close()

    asyncio.run(scenario())
