"""Calls of agents, direct and relayed, against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import resource
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import ASSIGN, CREATED, LIMIT, MASTER, PREPARE, UID, Heard, agent, forever
from builders.until import until_async
from concertina.agents import calls as calls_module
from concertina.agents import connections as module
from concertina.agents import relays
from concertina.agents.authority import Authority
from concertina.agents.calls import ConnectionIdentity
from concertina.agents.connections import AgentConnections
from concertina.api.pod_names import pod_name
from concertina.plan.actions import Send


def test_a_call_stands_in_the_view_from_the_moment_it_is_sent_and_is_not_sent_twice(tmp_path: Path) -> None:
    received: list[protocol.Message] = []
    gate = asyncio.Event()

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        received.append(message)
        await gate.wait()
        writer.write(protocol.encode(protocol.Prepared("r0", "i1", 1, "c1", 1, "127.0.0.1:1", ("r0",))))
        await writer.drain()

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(answer, tmp_path) as address:
            assert connections.send(UID, [Send("r0", address, PREPARE)])
            call = connections.views(UID)["r0"].prepare
            assert call is not None
            assert (call.round, call.claim, call.reply, call.error) == (1, "c1", None, "")
            assert not connections.send(UID, [Send("r0", address, PREPARE)])
            await until_async(lambda: len(received) == 1, "a request", lambda: received)
            gate.set()
            await until_async(lambda: bool(heard.changes), "a change", lambda: heard.changes)
            call = connections.views(UID)["r0"].prepare
            assert call is not None
            assert isinstance(call.reply, protocol.Prepared)
            assert not connections.send(UID, [Send("r0", address, PREPARE)])
            assert received == [PREPARE]
            of_more = dataclasses.replace(PREPARE, candidates=(*PREPARE.candidates, protocol.Candidate("r1", address)))
            assert connections.send(UID, [Send("r0", address, of_more)])
            assert not connections.send(UID, [Send("r0", address, PREPARE)]), "that call is under way"
            await until_async(lambda: received == [PREPARE, of_more], "the same about more", lambda: received)
            connections.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("requests", "expected"), [(2, 1), (1, 2)], ids=["kept", "closed by the agent"])
def test_an_assign_goes_where_its_prepare_went(requests: int, expected: int, tmp_path: Path) -> None:
    peers: list[object] = []

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        prepared = protocol.Prepared("r0", "i1", 1, "c1", 1, "127.0.0.1:1", ("r0",))
        reply = prepared if isinstance(message, protocol.Prepare) else protocol.Accepted(1, "c1")
        writer.write(protocol.encode(reply))
        await writer.drain()

    async def scenario() -> None:
        async with agent(answer, tmp_path, requests=requests) as address:
            heard = Heard()
            connections = AgentConnections(heard)
            await connections.open(UID, CREATED, MASTER)
            for answers, message in enumerate((PREPARE, ASSIGN), start=1):
                connections.send(UID, [Send("r0", address, message)])
                await until_async(functools.partial(lambda count: len(heard.changes) == count, answers), "an answer")
        assert len(set(peers)) == expected
        assert len(peers) == 2
        connections.close()

    asyncio.run(scenario())


def test_who_has_no_file_descriptor_left_accuses_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        connections, files = AgentConnections(Heard()), list[int]()
        await connections.open(UID, CREATED, MASTER)
        given = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with agent(forever, tmp_path) as address:
            try:
                files.append(os.open(os.devnull, os.O_RDONLY))
                resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 1, given[1]))
                with contextlib.suppress(OSError):  # Descriptors that were free below it.
                    while True:
                        files.append(os.open(os.devnull, os.O_RDONLY))
                connections.watch(UID, {"r0": address})
                await asyncio.sleep(3 * calls_module.NO_DESCRIPTOR_SECONDS)
                view = connections.views(UID)["r0"]
                assert (view.connected, view.wanted_at, view.lost_at, view.refusal) == (False, None, None, None)
            finally:
                for file in files:
                    os.close(file)
                resource.setrlimit(resource.RLIMIT_NOFILE, given)
            await until_async(
                lambda: connections.views(UID)["r0"].connected, "a report", lambda: connections.views(UID)
            )
            connections.close()

    asyncio.run(scenario())


def test_a_call_that_failed_says_why_and_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        connections.send(UID, [Send("r0", "127.0.0.1:1", PREPARE)])
        await until_async(lambda: bool(heard.changes), "a change", lambda: heard.changes)
        call = connections.views(UID)["r0"].prepare
        assert call is not None
        assert "127.0.0.1:1 can't be reached" in call.error
        assert connections.send(UID, [Send("r0", "127.0.0.1:1", PREPARE)])
        connections.close()

    asyncio.run(scenario())


def test_no_agent_is_called_once_another_operator_may_act(tmp_path: Path) -> None:
    """A call may have waited for its turn while the Lease was lost."""
    received: list[protocol.Message] = []

    async def answer(message: protocol.Message, _: asyncio.StreamWriter) -> None:
        received.append(message)

    async def scenario() -> None:
        connections = AgentConnections(Heard(), may_act=lambda: False)
        await connections.open(UID, CREATED, MASTER)
        async with agent(answer, tmp_path) as address:
            names = [f"r{number}" for number in range(module.RELAYED_ABOVE + 1)]
            for replicas in (names[:1], names):
                connections.send(UID, [Send(name, address, PREPARE) for name in replicas])
                await until_async(
                    lambda: all((call := view.prepare) and call.error for view in connections.views(UID).values()),
                    "the ends of the calls",
                    lambda: connections.views(UID),
                )
        calls = [view.prepare for view in connections.views(UID).values()]
        assert {call.error for call in calls if call} == {"another operator may be the leader by now"}
        assert not received
        connections.close()

    asyncio.run(scenario())


def test_an_answer_to_an_older_claim_does_not_replace_a_newer_call(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        assert isinstance(message, protocol.Prepare)
        if message.round == 1:
            await gate.wait()
        writer.write(protocol.encode(protocol.Refused("no", message.round, message.claim)))
        await writer.drain()

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(answer, tmp_path) as address:
            connections.send(UID, [Send("r0", address, PREPARE)])
            connections.send(UID, [Send("r0", address, protocol.Prepare(UID, 2, "c2", ()))])
            await until_async(lambda: len(heard.changes) == 1, "a change", lambda: heard.changes)
            gate.set()
            await asyncio.sleep(0.1)
            call = connections.views(UID)["r0"].prepare
            assert call is not None
            assert call.round == 2
            assert len(heard.changes) == 1
            connections.close()

    asyncio.run(scenario())


def test_a_call_that_nobody_foresaw_to_fail_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(message: object) -> object:
        raise RecursionError("too deep")

    async def answer(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.encode(protocol.Accepted(1, "c1")))
        await writer.drain()

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        monkeypatch.setattr(calls_module, "bounded", surprise)
        async with agent(answer, tmp_path) as address:
            assert connections.send(UID, [Send("r0", address, PREPARE)])
            await until_async(
                lambda: (found := connections.views(UID)["r0"].prepare) and found.done_at,
                "the end of the call",
                lambda: connections.views(UID),
            )
            failed = connections.views(UID)["r0"].prepare
            assert failed is not None
            assert "RecursionError: too deep" in failed.error
            connections.close()

    asyncio.run(scenario())


def test_an_answer_is_waited_for_by_the_time_in_which_the_operator_ran(tmp_path: Path) -> None:
    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections, go_on = AgentConnections(Heard(), clock=lambda: now, wall=lambda: now), asyncio.Event()

        async def late(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
            await go_on.wait()
            writer.write(protocol.encode(protocol.Accepted(1, "c1")))
            await writer.drain()

        await connections.open(UID, CREATED, MASTER)
        async with agent(late, tmp_path) as address:
            assert connections.send(UID, [Send("r0", address, PREPARE)])
            now += 60.0
            under_way = connections.views(UID)["r0"].prepare
            assert under_way
            assert (under_way.sent_at, under_way.done_at) == (1060.0, None)
            go_on.set()
            await until_async(
                lambda: connections.views(UID)["r0"].prepare.done_at is not None,
                "the end of the call",
                lambda: connections.views(UID),
            )  # type: ignore[union-attr]
        answered = connections.views(UID)["r0"].prepare
        assert answered
        assert (answered.reply, answered.done_at) == (protocol.Accepted(1, "c1"), 1060.0)
        now += 60.0
        answered = connections.views(UID)["r0"].prepare
        assert answered
        assert answered.done_at == 1120.0
        connections.close()

    asyncio.run(scenario())


def parts(indexes: Iterable[int], heard: Collection[int] = ()) -> list[list[int]]:
    """Return the indexes of the replicas in each part of a relayed call; the first one of a part relays it."""
    connected = {pod_name("job", i, 0): i in heard for i in indexes}
    return [[int(name.split("-")[1]) for name in part] for part in relays.parts(list(connected), connected.__getitem__)]


def test_what_is_said_to_many_is_said_to_some_of_them_first_to_those_that_are_heard() -> None:
    """4096 replicas are called over 64 connections. Each of these replicas relays the call to 63 others."""
    split_parts = parts(range(100), heard=(7, 51, 99))
    assert [len(part) for part in split_parts] == [10] * 10
    assert {7, 51, 99} <= {part[0] for part in split_parts}
    assert sorted(index for part in split_parts for index in part) == list(range(100))


def test_the_same_pass_it_on_to_the_same_when_some_are_gone() -> None:
    """Their connections to each other are then still open."""
    before = {part[0]: set(part) for part in parts(range(1024), heard=range(1024))}
    lost = {5, 40, 700}
    after = {part[0]: set(part) for part in parts(set(range(1024)) - lost, heard=(0,))}
    assert len(before.keys() & after.keys()) == 31, "one of those who passed it on is lost"
    assert all(part <= before[first] for first, part in after.items() if first in before)


def test_an_answer_that_is_passed_on_is_whole_however_long(tmp_path: Path) -> None:
    """The answer is that of a candidate that reaches a hundred others."""
    names = tuple(f"a-job-with-a-long-name-{i}-0" for i in range(100))
    prepared = protocol.Prepared("r1", "i1", 1, "c1", 1, "127.0.0.1:1", names)

    async def passed_on(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        assert isinstance(message, protocol.Relay)
        assert protocol.decode(message.line.encode()) == PREPARE
        line = protocol.encode(prepared).decode().rstrip("\n")
        writer.write(protocol.encode(protocol.Relayed("r1", line)))
        writer.write(protocol.encode(protocol.Relayed("r2", error="it is not there")))
        await writer.drain()

    async def scenario() -> None:
        identity = ConnectionIdentity(UID, Authority(MASTER, UID, CREATED).client_context())
        async with agent(passed_on, tmp_path) as address:
            to = {"r1": address, "r2": "127.0.0.1:1"}
            line = protocol.encode(PREPARE).decode().rstrip("\n")
            answers = [each async for each in relays.relay(identity, address, PREPARE, line, to)]
            assert answers == [("r1", prepared), ("r2", None)]

    asyncio.run(scenario())


def test_one_that_was_to_pass_something_on_and_babbles_holds_nobody_up(tmp_path: Path) -> None:
    async def babble(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(protocol.encode(protocol.Relayed("nobody", "{}")))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        identity = ConnectionIdentity(UID, Authority(MASTER, UID, CREATED).client_context())
        async with agent(babble, tmp_path) as address, asyncio.timeout(LIMIT):
            assert [each async for each in relays.relay(identity, address, PREPARE, "{}", {"r1": address}, 0.3)] == []

    asyncio.run(scenario())


def test_no_line_to_an_agent_waits_for_the_acknowledgement_of_the_one_before(tmp_path: Path) -> None:
    watch = protocol.Watch(UID)

    async def scenario() -> None:
        identity = ConnectionIdentity(UID, Authority(MASTER, UID, CREATED).client_context())
        async with agent(forever, tmp_path) as address, calls_module.connection(identity, address, watch) as opened:
            dialled = opened.writer.get_extra_info("socket")
            assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(scenario())
