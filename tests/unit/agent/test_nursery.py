"""Background tasks of the agent: no end of a task goes unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from concertina_agent.runtime.nursery import TaskGroup


async def lasts() -> None:
    await asyncio.sleep(60)


async def breaks() -> None:
    raise ValueError("out of order")


@pytest.mark.parametrize("fatal", [True, False])
def test_an_error_nobody_foresaw_is_logged_by_the_tasks_name_and_told_where_it_is_everybodys(fatal, capsys):
    errors: list[BaseException] = []

    async def body() -> None:
        tasks = TaskGroup(errors.append if fatal else None)
        tasks.start("copy shard", breaks())
        lasting = tasks.start("tick", lasts())
        await asyncio.sleep(0.01)
        assert len(tasks) == 1
        assert not lasting.done(), "the others go on"
        await tasks.close()
        assert len(tasks) == 0

    asyncio.run(body())
    assert [str(error) for error in errors] == (["out of order"] if fatal else [])
    (line,) = capsys.readouterr().err.splitlines()
    assert '"event":"task_failed","task":"copy shard","error":"ValueError: out of order"' in line


def test_what_runs_alongside_ends_with_its_block():
    async def body() -> None:
        tasks = TaskGroup()
        with tasks.alongside("tell coordinator", lasts()):
            await asyncio.sleep(0)
            assert len(tasks) == 1
        await asyncio.sleep(0.01)
        assert len(tasks) == 0

    asyncio.run(body())


def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    """asyncio.wait_for loses a cancellation before Python 3.12, if the awaited operation ends in the same moment."""
    cancelled = 0

    async def work() -> None:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled += 1

    async def scenario() -> None:
        nursery = TaskGroup()
        nursery.start("work", work())
        await asyncio.sleep(0)
        await asyncio.wait_for(nursery.close(), 60)
        assert cancelled == 3
        assert len(nursery) == 0

    asyncio.run(scenario())
