"""Wait with a time limit: it loses neither a cancellation nor the result, even if the two coincide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from concertina_protocol.waiting import together, within

TICKS = range(6)
"""Turns of the event loop between the end of the work and the cancellation, to cover all that lies between."""


async def cancelled_after(ticks: int, task: asyncio.Task[None], end: Callable[[], None]) -> None:
    """End the work, then cancel the task, which has to end."""
    await asyncio.sleep(0.001)
    end()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=10)  # only a limit
    still_runs = not task.done()
    task.cancel()
    assert not still_runs


@pytest.mark.parametrize("ticks", TICKS)
def test_who_tries_again_after_an_error_can_be_cancelled_at_any_moment(ticks: int) -> None:
    async def scenario() -> None:
        works: list[asyncio.Future[None]] = []

        async def work() -> None:
            works.append(asyncio.get_running_loop().create_future())
            await works[-1]

        async def tries_again() -> None:
            while True:
                try:
                    await within(60, work())
                except OSError:
                    await asyncio.sleep(0)

        task = asyncio.create_task(tries_again())
        await cancelled_after(ticks, task, lambda: works[0].set_exception(OSError("refused")))

    asyncio.run(scenario())


@pytest.mark.parametrize("ticks", TICKS)
def test_what_was_opened_when_the_cancellation_came_is_closed(ticks: int) -> None:
    async def scenario() -> None:
        opens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        opened = closed = 0

        async def opening() -> str:
            nonlocal opened
            await opens
            opened += 1
            return "a connection"

        async def talks() -> None:
            nonlocal closed
            assert await within(60, opening()) == "a connection"
            try:
                while True:
                    await asyncio.sleep(60)
            finally:
                closed += 1

        task = asyncio.create_task(talks())
        await cancelled_after(ticks, task, lambda: opens.set_result(None))
        assert task.cancelled()
        assert (opened, closed) in ((0, 0), (1, 1))

    asyncio.run(scenario())


def test_what_takes_too_long_is_cancelled_and_has_ended() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.001)
            ends.append("ended")

    async def scenario() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.001, work())
        assert ends == ["ended"]

    asyncio.run(scenario())


def test_what_ends_as_its_time_is_up_counts() -> None:
    async def work() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 3
        return 0

    assert asyncio.run(within(0.001, work())) == 3


def test_its_errors_and_its_own_end_come_through() -> None:
    async def fails() -> None:
        raise OSError("refused")

    async def scenario() -> None:
        with pytest.raises(OSError, match="refused"):
            await within(60, fails())
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(60, given_up)

    asyncio.run(scenario())


def test_who_is_cancelled_twice_has_ended_with_its_work() -> None:
    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.set()

        task = asyncio.create_task(within(60, work()))
        await begun.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.001)
        await asyncio.wait({task})
        assert task.cancelled()
        assert ended.is_set()

    asyncio.run(scenario())


def test_what_is_done_together_is_given_in_order() -> None:
    async def gives(what: int, first: asyncio.Event, then: asyncio.Event) -> int:
        await first.wait()
        then.set()
        return what

    async def scenario() -> None:
        begun, over = asyncio.Event(), asyncio.Event()
        begun.set()
        assert await together(gives(1, over, over), gives(2, begun, over)) == [1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("cancelled", [False, True])
def test_where_one_fails_or_nobody_waits_any_more_the_others_have_ended(cancelled: bool) -> None:
    async def scenario() -> None:
        begun, ends = asyncio.Event(), list[str]()

        async def goes_on() -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.001)
                ends.append("ended")

        async def fails() -> None:
            await (asyncio.sleep(60) if cancelled else begun.wait())
            raise OSError("refused")

        task = asyncio.create_task(together(goes_on(), fails()))
        await begun.wait()
        if cancelled:
            task.cancel()
        await asyncio.wait({task})
        assert ends == ["ended"]
        assert task.cancelled() if cancelled else str(task.exception()) == "refused"

    asyncio.run(scenario())
