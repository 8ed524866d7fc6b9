"""Slots in turns: nobody waits behind all that another one asks for."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from concertina.cluster.turns import Turns


async def take(turns: Turns, key: str, served: list[str]) -> None:
    async with turns.turn(key):
        served.append(key)
        await asyncio.sleep(0)


def test_one_who_asks_for_many_delays_another_by_one_turn() -> None:
    async def scenario() -> list[str]:
        turns, served = Turns(1), list[str]()
        many = [asyncio.create_task(take(turns, "large", served)) for _ in range(1000)]
        await asyncio.sleep(0)
        await take(turns, "small", served)
        await asyncio.gather(*many)
        return served

    served = asyncio.run(scenario())
    assert served.index("small") <= 2
    assert len(served) == 1001


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_slots_are_never_exceeded_or_lost(slots: int, wanted: list[tuple[str, bool]]) -> None:
    """Whoever is cancelled while waiting, or just as its turn comes, leaves the slot to the next."""

    async def scenario() -> None:
        turns, taken, most = Turns(slots), 0, 0

        async def hold(key: str) -> None:
            nonlocal taken, most
            async with turns.turn(key):
                taken += 1
                most = max(most, taken)
                try:
                    await asyncio.sleep(0)
                finally:
                    taken -= 1

        tasks = []
        for key, cancelled in wanted:
            tasks.append(asyncio.create_task(hold(key)))
            await asyncio.sleep(0)
            if cancelled:
                tasks[len(tasks) // 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= slots
        async with asyncio.timeout(60):  # all slots are there again
            await asyncio.gather(*(hold("z") for _ in range(slots * 2)))
        assert (taken, most <= slots) == (0, True)

    asyncio.run(scenario())
