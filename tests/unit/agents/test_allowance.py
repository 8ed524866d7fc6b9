"""Processor time for lines of agents, which is accounted to their namespace. The clock moves only during waits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from concertina.agents.allowance import (
    HOLD_SECONDS,
    LINE_SECONDS,
    LOG_SECONDS,
    SAVED_SECONDS,
    SHARE,
    Allowance,
)

BEGIN, END = 1000.0, 1100.0
EXPENSIVE, CHEAP = 0.3, 0.0002
"""Processor time of a line in seconds."""


@dataclass
class Clock:
    now: float = BEGIN
    processor: float = 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def allowance(self, namespace: str = "") -> Allowance:
        return Allowance(lambda: self.now, lambda: self.processor, self.sleep, namespace)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        if self.now + seconds > END:
            self.over.set()
            await asyncio.Event().wait()
        self.now += seconds


async def says_lines(clock: Clock, allowance: Allowance, cost: float, costs: list[float]) -> None:
    """Send lines as fast as they are accepted."""

    def line() -> None:
        clock.processor += cost
        costs.append(cost + LINE_SECONDS)

    while True:
        await allowance.handle(line)


@pytest.mark.parametrize("agents", [1, 20])
def test_the_agents_of_a_namespace_have_one_share_of_the_time_however_many_they_are(agents: int) -> None:
    async def scenario() -> None:
        clock, costs = Clock(), list[float]()
        allowance = clock.allowance()
        tasks = [asyncio.create_task(says_lines(clock, allowance, EXPENSIVE, costs)) for _ in range(agents)]
        await clock.over.wait()
        allowed = SHARE * (END - BEGIN + SAVED_SECONDS)
        assert allowed - EXPENSIVE <= sum(costs) <= allowed + 2 * EXPENSIVE
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_lines_of_another_namespace_wait_for_nothing() -> None:
    async def scenario() -> None:
        clock, hostile, costs = Clock(), list[float](), list[float]()
        spent = clock.allowance()
        tasks = [asyncio.create_task(says_lines(clock, spent, EXPENSIVE, hostile)) for _ in range(4)]
        await clock.over.wait()
        honest, before = clock.allowance(), clock.now
        for _ in range(100):
            await honest.handle(lambda: costs.append(CHEAP))
        assert clock.now == before
        assert len(costs) == 100
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_lines_give_way_before_they_have_held_the_event_loop_for_long() -> None:
    """A buffer may contain a thousand lines, which are read without a turn of the event loop."""

    async def scenario() -> None:
        clock, costs, turns = Clock(), list[float](), 0
        task = asyncio.create_task(says_lines(clock, clock.allowance(), CHEAP, costs))
        for turns in range(1, 50):
            await asyncio.sleep(0)
            assert len(costs) <= turns * (1 + HOLD_SECONDS / CHEAP)
        task.cancel()
        assert len(costs) > turns

    asyncio.run(scenario())


def test_lines_of_many_streams_share_a_turn_of_the_event_loop() -> None:
    """One line a turn is too few while a thousand jobs start: lines would arrive faster than they are handled."""

    async def scenario() -> None:
        clock, costs, turns = Clock(), list[float](), 50
        allowance = clock.allowance()
        tasks = [asyncio.create_task(says_lines(clock, allowance, CHEAP, costs)) for _ in range(100)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert len(costs) > turns / 2 * HOLD_SECONDS / (CHEAP + LINE_SECONDS) / 2

    asyncio.run(scenario())


def test_a_line_whose_stream_was_closed_while_it_waited_is_not_handled() -> None:
    async def scenario() -> None:
        clock, handled = Clock(), list[str]()
        allowance = clock.allowance()

        def spend() -> None:
            clock.processor += HOLD_SECONDS

        await allowance.handle(spend)
        waiting = [asyncio.create_task(allowance.handle(lambda name=name: handled.append(name))) for name in "ab"]
        await asyncio.sleep(0)
        assert handled == []
        waiting[0].cancel()
        await waiting[1]
        assert handled == ["b"]

    asyncio.run(scenario())


def test_a_line_that_fails_fails_its_own_stream() -> None:
    async def scenario() -> None:
        clock, handled = Clock(), list[str]()
        allowance = clock.allowance()

        def fail() -> None:
            clock.processor += HOLD_SECONDS
            raise ValueError("not a message")

        waiting = [asyncio.create_task(allowance.handle(line)) for line in (fail, fail, lambda: handled.append("c"))]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ValueError, ValueError, type(None)]
        assert handled == ["c"]

    asyncio.run(scenario())


def test_what_is_not_used_is_saved_for_a_while() -> None:
    clock = Clock()
    allowance = clock.allowance()
    assert allowance.untouched
    asyncio.run(allowance.handle(lambda: None))
    assert not allowance.untouched, "a line that costs nothing was received"
    clock.now += 2 * LINE_SECONDS / SHARE
    assert allowance.untouched


def test_a_namespace_that_has_spent_its_share_is_named_in_the_log_from_time_to_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> None:
        clock = Clock()
        spends, saves = clock.allowance("spends"), clock.allowance("saves")
        task = asyncio.create_task(says_lines(clock, spends, EXPENSIVE, []))
        await clock.over.wait()
        await saves.handle(lambda: None)
        task.cancel()

    asyncio.run(scenario())
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(event["event"], event["namespace"]) for event in events] == [("agents_held_back", "spends")] * 2
    assert END - BEGIN < 2 * LOG_SECONDS
