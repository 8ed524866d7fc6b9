"""End of a pod's tasks: they end when they are cancelled, whatever they wait for."""

import asyncio

from concertina.local.node.ending import end


def test_a_cancellation_that_gather_forgets_is_repeated() -> None:
    async def play() -> int:
        heard, tries = 0, 0
        fails: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def tries_again() -> None:
            nonlocal heard, tries
            while True:
                tries += 1
                try:
                    await asyncio.gather(fails, asyncio.sleep(60))
                except OSError:
                    pass
                except asyncio.CancelledError:
                    heard += 1
                    raise
                await asyncio.sleep(60)

        task = asyncio.create_task(tries_again())
        await asyncio.sleep(0)
        fails.set_exception(OSError("of the same moment"))
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "gather() has changed: once is enough now"
        await asyncio.wait_for(end(task), 10)
        assert task.cancelled()
        assert tries == 1
        return heard

    assert asyncio.run(play()) == 0  # The task was cancelled while it slept.


def test_what_has_ended_is_left_alone() -> None:
    async def play() -> None:
        task = asyncio.create_task(asyncio.sleep(0, "its result"))
        await task
        await end(task)
        await end()
        assert task.result() == "its result"

    asyncio.run(play())
