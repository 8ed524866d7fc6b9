"""Calls on the connection of a stream, against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import ASSIGN, CREATED, LIMIT, MASTER, PREPARE, UID, Answer, Heard, agent, report
from builders.until import until_async
from concertina.agents import connections as module
from concertina.agents.connections import AgentConnections
from concertina.plan.actions import Send
from concertina.plan.observed import Call
from concertina_protocol.connection import abort

DRAIN = protocol.Drain(UID, 1, "c1", "scaled", durable=False, grace_seconds=1.0)
PREPARED = protocol.Prepared("r0", "i1", 1, "c1", 1, "127.0.0.1:1", ("r0",))
Scenario = Callable[[AgentConnections, Heard, str], Awaitable[None]]


def said(heard: list[tuple[object, str]], takes_calls: bool = True) -> Answer:
    """Return a server's answer like an agent's, which appends the connection and kind of each request to `heard`."""

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        heard.append((writer.get_extra_info("peername"), type(message).__name__))
        told = {
            protocol.Watch: dataclasses.replace(report(), takes_calls=takes_calls),
            protocol.Prepare: PREPARED,
        }
        writer.write(protocol.encode(told.get(type(message), protocol.Accepted(1, "c1"))))
        await writer.drain()

    return answer


def play(scenario: Scenario, answer: Answer, folder: Path) -> None:
    async def whole() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(answer, folder, requests=10) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: connections.views(UID)["r0"].connected, "a stream")
            async with asyncio.timeout(LIMIT):
                await scenario(connections, heard, address)
        connections.close()

    asyncio.run(whole())


async def told(connections: AgentConnections, address: str, message: module.protocol.Message) -> Call:
    kind = module.CALLS[type(message)]
    connections.send(UID, [Send("r0", address, message)])
    call: Callable[[], Call] = lambda: getattr(connections.views(UID)["r0"], kind)  # noqa: E731
    await until_async(lambda: call().done_at is not None, "an answer", call)
    return call()


@pytest.mark.parametrize(("takes_calls", "connections_made"), [(True, 1), (False, 2)], ids=["now", "an older agent"])
def test_what_is_asked_is_answered_between_the_lines_of_the_stream(
    takes_calls: bool, connections_made: int, tmp_path: Path
) -> None:
    heard: list[tuple[object, str]] = []

    async def scenario(connections: AgentConnections, _: Heard, address: str) -> None:
        assert (await told(connections, address, PREPARE)).reply == PREPARED
        # The two answers have the same bytes, and a stream would take the second one for no news.
        assert (await told(connections, address, ASSIGN)).reply == protocol.Accepted(1, "c1")
        assert (await told(connections, address, DRAIN)).reply == protocol.Accepted(1, "c1")
        assert connections.views(UID)["r0"].connected

    play(scenario, said(heard, takes_calls), tmp_path)
    assert [kind for _, kind in heard] == ["Watch", "Prepare", "Assign", "Drain"]
    assert len({peer for peer, _ in heard}) == connections_made


def test_what_a_stream_took_along_when_it_broke_is_asked_again(tmp_path: Path) -> None:
    heard: list[tuple[object, str]] = []
    well = said(heard)

    async def breaks_once(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, protocol.Prepare) and len(heard) == 1:
            heard.append((writer.get_extra_info("peername"), "broken"))
            abort(writer)
        else:
            await well(message, writer)

    async def scenario(connections: AgentConnections, _: Heard, address: str) -> None:
        call = await told(connections, address, PREPARE)
        assert (call.reply, call.error) == (PREPARED, "")

    play(scenario, breaks_once, tmp_path)
    assert [kind for _, kind in heard if kind != "Watch"] == ["broken", "Prepare"]


def test_a_late_answer_is_not_taken_for_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.agents.calls.CALL_SECONDS", 0.1)
    heard: list[tuple[object, str]] = []
    well, gate = said(heard), asyncio.Event()

    async def late(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, protocol.Prepare):
            await gate.wait()
        await well(message, writer)

    async def scenario(connections: AgentConnections, _: Heard, address: str) -> None:
        assert "did not answer" in (await told(connections, address, PREPARE)).error
        monkeypatch.setattr("concertina.agents.calls.CALL_SECONDS", LIMIT)
        connections.send(UID, [Send("r0", address, ASSIGN)])
        gate.set()
        call = lambda: connections.views(UID)["r0"].assign  # noqa: E731
        await until_async(lambda: call().done_at is not None, "an answer", call)
        assert call().reply == protocol.Accepted(1, "c1")

    play(scenario, late, tmp_path)
    assert len({peer for peer, _ in heard}) == 1


def test_a_stream_that_is_not_wanted_any_more_stays_for_the_answer(tmp_path: Path) -> None:
    heard: list[tuple[object, str]] = []
    well, gate = said(heard), asyncio.Event()

    async def patient(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, protocol.Assign):
            await gate.wait()
        await well(message, writer)

    async def scenario(connections: AgentConnections, changes: Heard, address: str) -> None:
        connections.send(UID, [Send("r0", address, ASSIGN)])
        connections.watch(UID, {})
        assert connections.views(UID)["r0"].connected
        before = len(changes.changes)
        gate.set()
        await until_async(lambda: len(changes.changes) > before, "the word that brings the next pass")
        assert connections.views(UID)["r0"].assign.reply == protocol.Accepted(1, "c1")
        connections.watch(UID, {})
        assert not connections.views(UID)["r0"].connected

    play(scenario, patient, tmp_path)
    assert len({peer for peer, _ in heard}) == 1


def test_answers_are_told_together_and_at_once_with_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER_SECONDS", LIMIT)
    heard: list[tuple[object, str]] = []
    well, gate = said(heard), asyncio.Event()

    async def last_waits(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, protocol.Prepare) and sum(kind == "Prepare" for _, kind in heard) == 2:
            await gate.wait()
        await well(message, writer)

    async def scenario(connections: AgentConnections, changes: Heard, address: str) -> None:
        before = len(changes.changes)
        connections.send(UID, [Send(name, address, PREPARE) for name in ("a", "b", "c")])
        calls = lambda: [view.prepare for view in connections.views(UID).values() if view.prepare]  # noqa: E731
        await until_async(lambda: sum(call.done_at is not None for call in calls()) == 2, "two answers", calls)
        assert len(changes.changes) == before
        gate.set()
        await until_async(lambda: all(call.done_at is not None for call in calls()), "all answers", calls)
        assert changes.changes[before:] == [True]

    play(scenario, last_waits, tmp_path)
