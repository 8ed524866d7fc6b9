"""Stream of a member to its coordinator, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

import concertina_protocol as p
from builders.agent import assignment, join
from builders.until import until_async
from concertina_agent.core import events as e
from concertina_agent.net.link import follow_coordinator
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.notifier import Notifier
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol.connection import Connection

STATE = p.MemberState("b", "b-1", 1, "claim-1", p.State.RUNNING)


class Plain(Connector):
    """Connector without TLS to a coordinator on this machine that accepts every member. It keeps the connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.made: list[Connection] = []

    async def connect(self, address: str, timeout: float = 3.0) -> Connection:
        self.made.append(Connection(*await asyncio.open_connection("127.0.0.1", self._port)))
        return self.made[-1]


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(p.encode(p.Accepted(1, "claim-1")))
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        (errno.ETIMEDOUT, "can't be reached: Connection timed out"),
        (errno.EHOSTUNREACH, "can't be reached: No route to host"),
        (errno.ECONNRESET, ""),
    ],
)
def test_a_coordinator_whose_node_has_vanished_is_gone_as_any_other(code: int, detail: str) -> None:
    """When the kernel gives up a connection, the error is not always a ConnectionError."""
    events: list[e.Event] = []
    unforeseen: list[BaseException] = []

    async def scenario() -> None:
        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            connector, tasks = Plain(server.sockets[0].getsockname()[1]), TaskGroup(unforeseen.append)
            following = tasks.start(
                "follow coordinator",
                follow_coordinator(
                    connector, assignment("a", "b"), join("b"), lambda: STATE, Notifier(), events.append, tasks
                ),
            )
            await until_async(lambda: bool(events), "joined", lambda: events)
            server.close()  # The port refuses connections from now on.
            connector.made[0].reader.set_exception(OSError(code, os.strerror(code)))
            await asyncio.wait({following})
            await tasks.close()

    asyncio.run(scenario())
    assert [str(error) for error in unforeseen] == []
    assert events == [e.CoordinatorJoined(1, "claim-1"), e.CoordinatorGone(1, "claim-1", detail)]


@pytest.mark.parametrize("again", ["accepted", "refused", "silent"])
def test_a_stream_that_breaks_is_opened_again_unless_nobody_is_there(again: str) -> None:
    """A coordinator that does not answer is lost after RECONNECT_SECONDS, and one with a closed port at once."""
    events: list[e.Event] = []
    joins = 0

    async def coordinator(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal joins
        await reader.readline()
        joins += 1
        if joins == 1 or again == "accepted":
            writer.write(p.encode(p.Accepted(1, "claim-1")))
        await reader.read()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(coordinator, "127.0.0.1", 0) as server:
            connector, tasks = Plain(server.sockets[0].getsockname()[1]), TaskGroup()
            following = follow_coordinator(
                connector, assignment("a", "b"), join("b"), lambda: STATE, Notifier(), events.append, tasks
            )
            task = tasks.start("follow coordinator", following)
            await until_async(lambda: bool(events), "joined", lambda: events)
            if again == "refused":
                server.close()
            connector.made[0].close()
            if again == "accepted":
                await until_async(lambda: len(events) == 2, "joined again", lambda: events)
            else:
                await asyncio.wait({task})
            await tasks.close()

    asyncio.run(scenario())
    joined, gone = e.CoordinatorJoined(1, "claim-1"), e.CoordinatorGone(1, "claim-1")
    assert events == ([joined, joined] if again == "accepted" else [joined, gone])
    assert joins == {"accepted": 2, "refused": 1, "silent": 2}[again]


def test_who_leaves_the_round_while_the_coordinator_is_not_there_yet_closes_its_connection() -> None:
    asked = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(p.encode(p.Refused("does not coordinate round 1 (yet)", 0, "")))
            asked.set()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            connector, tasks = Plain(server.sockets[0].getsockname()[1]), TaskGroup()
            joining = follow_coordinator(
                connector, assignment("a", "b"), join("b"), lambda: STATE, Notifier(), lambda event: None, tasks
            )
            tasks.start("follow coordinator", joining)
            await asked.wait()
            await tasks.close()
            assert [wire.over for wire in connector.made] == [True]

    asyncio.run(scenario())
