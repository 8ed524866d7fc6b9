"""Slots in turns: no waiting task is blocked by the many requests of another one."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from concertina.turns import FairLimiter


async def take(turns: FairLimiter, key: str, served: list[str]) -> None:
    async with turns.turn(key):
        served.append(key)
        await asyncio.sleep(0)


def test_one_who_asks_for_many_delays_another_by_one_turn() -> None:
    async def scenario() -> list[str]:
        turns, served = FairLimiter(1), list[str]()
        many = [asyncio.create_task(take(turns, "large", served)) for _ in range(1000)]
        await asyncio.sleep(0)
        await take(turns, "small", served)
        await asyncio.gather(*many)
        return served

    served = asyncio.run(scenario())
    assert served.index("small") <= 2
    assert len(served) == 1001


def test_a_key_has_its_turn_in_one_piece_and_lanes_go_slot_by_slot() -> None:
    async def scenario() -> list[str]:
        turns, served = FairLimiter(1, a_turn=2), list[str]()

        async def take_in(lane: str, key: str) -> None:
            async with turns.turn(lane, key):
                served.append(key)
                await asyncio.sleep(0)

        wanted = [("one", "a"), *[("one", key) for key in "bcbcbc"], *[("other", "x")] * 2]
        await asyncio.gather(*(take_in(*each) for each in wanted))
        return served

    assert "".join(asyncio.run(scenario())) == "abxbxccbc"


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.none() | st.integers(0, 30)), max_size=30),
)
def test_slots_are_never_exceeded_or_lost(slots: int, wanted: list[tuple[str, int, int | None]]) -> None:
    """A task that is cancelled while it waits, or just as its turn comes, leaves the slot to the next."""

    async def scenario() -> None:
        turns, taken, most = FairLimiter(slots), 0, 0

        async def hold(key: str, ticks: int) -> None:
            nonlocal taken, most
            async with turns.turn(key in "ab", key):
                taken += 1
                most = max(most, taken)
                try:
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                finally:
                    taken -= 1

        tasks: list[asyncio.Task[None]] = []
        for key, ticks, cancelled in wanted:
            tasks.append(asyncio.create_task(hold(key, ticks)))
            await asyncio.sleep(0)
            if cancelled is not None:
                tasks[cancelled % len(tasks)].cancel()
        for _ in range(200):
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks), "somebody waits for a slot that is free"
        later = [asyncio.create_task(hold("z", 2)) for _ in range(slots)]
        await asyncio.sleep(0)
        assert taken == slots, "all slots are there again"
        await asyncio.gather(*later)
        assert (taken, most <= slots) == (0, True)

    asyncio.run(scenario())
