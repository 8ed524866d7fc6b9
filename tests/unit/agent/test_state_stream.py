"""Lines of an agent's stream for news, for mere numbers, and without any change."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import concertina_protocol as p
from builders.until import until_async
from concertina_agent.net import state_stream
from concertina_agent.net.state_stream import CHANGES, stream
from concertina_agent.runtime.notifier import Notifier

NEVER = 1e6
"""Seconds that are longer than any test."""
FIRST = p.Report(
    "r0",
    "i0",
    True,
    1,
    "c",
    p.State.RUNNING,
    coordinator=True,
    members={"r1": p.MemberState("r1", "i1", 1, "c", p.State.RUNNING)},
    progress=p.Progress(0, None, 1.0, 1.0, 1.0, 0, "training", 1.0),
)


class Wire:
    """Connection that records the sent messages."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    async def send(self, message: p.Message) -> None:
        await self.send_line(p.encode(message))

    async def send_line(self, line: bytes) -> None:
        self.lines.append(line)


def at(step: int, **changes: Any) -> p.Report:
    assert FIRST.progress
    return dataclasses.replace(FIRST, progress=dataclasses.replace(FIRST.progress, step=step), **changes)


async def said(reports: list[p.Report], pace: float, beat: float, enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """Return the messages of an agent whose reports follow each other, until there are enough of them."""
    wire, changes = Wire(), Notifier()
    now = 0

    def more() -> bool:
        return len(wire.lines) > now

    streaming = asyncio.create_task(stream(wire, lambda: reports[now], changes, CHANGES, pace, lambda _: beat))  # type: ignore[arg-type]
    while True:
        await until_async(more, "more lines", lambda: wire.lines)
        if now == len(reports) - 1:
            break
        now += 1
        changes.notify()
    await until_async(lambda: enough(wire.lines), "enough", lambda: wire.lines)
    streaming.cancel()
    return wire.lines


def test_numbers_wait_for_their_pace_and_meanwhile_the_same_bytes_say_that_nothing_is_new() -> None:
    lines = asyncio.run(said([at(step) for step in range(5)], NEVER, 0.01, lambda lines: len(lines) > 10))
    whole, *beats = lines
    assert p.decode(whole) == FIRST
    assert set(beats) == {p.encode(p.change(FIRST, FIRST))}


def test_what_is_more_than_a_number_is_said_at_once() -> None:
    failed = p.Failure("r1", p.FailureReason.MEMBER_LOST, "gone")
    reports = [at(0), at(7), at(8, failures=(failed,))]
    lines = asyncio.run(said(reports, NEVER, 0.01, lambda lines: p.encode(p.change(at(0), reports[-1])) in lines))
    assert all(p.changed(FIRST, p.decode(line)).progress == FIRST.progress for line in lines[1:-1])  # type: ignore[arg-type]


def test_numbers_are_said_when_their_time_has_come() -> None:
    lines = asyncio.run(said([at(step) for step in range(5)], 0.0, NEVER, lambda lines: True))
    assert [p.decode(line).report.progress.step for line in lines[1:]] == [1, 2, 3, 4]  # type: ignore[union-attr]


def test_lines_that_take_long_do_not_delay_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(state_stream.time, "thread_time", lambda: next(clock))
    failed = p.Failure("r1", p.FailureReason.MEMBER_LOST, "gone")
    lines = asyncio.run(said([at(0), at(1), at(2, failures=(failed,))], 0.0, NEVER, lambda lines: len(lines) > 2))
    assert p.changed(at(1), p.decode(lines[-1])).failures == (failed,)  # type: ignore[arg-type]
