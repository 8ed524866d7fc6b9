"""Calls that travel through the coordinator's stream, against real TLS servers that speak the protocol's lines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import ASSIGN, CREATED, LIMIT, MASTER, PREPARE, UID, Heard, agent
from builders.until import until_async
from concertina.agents import relays
from concertina.agents.calls import StreamCalls
from concertina.agents.connections import CALLS, AgentConnections
from concertina.agents.relays import Coordinator
from concertina.plan.actions import Send
from concertina.plan.observed import Call

COORDINATOR, NOBODY = "r0", "127.0.0.1:1"
PassOn = Callable[[protocol.Relay, Callable[[protocol.Relayed], None]], Awaitable[None]]


def prepared(replica: str, round: int = 1) -> protocol.Prepared:
    return protocol.Prepared(replica, "i1", round, f"c{round}", 1, NOBODY, (replica,))


def line(message: protocol.Message) -> str:
    return protocol.encode(message).decode().rstrip("\n")


def member(replica: str, failure: protocol.FailureReason | None = None) -> protocol.MemberState:
    state = protocol.MemberState(replica, "i1", 0, "", protocol.State.RUNNING)
    return dataclasses.replace(state, failure=failure and protocol.Failure(replica, failure, "why"))


def coordinators(*members: protocol.MemberState) -> protocol.Report:
    listed = {state.replica: state for state in (member(COORDINATOR), *members)}
    return protocol.Report(
        COORDINATOR, "i1", True, 0, "", protocol.State.RUNNING, coordinator=True, members=listed, takes_calls=True
    )


@dataclasses.dataclass
class Job:
    """Connections of an operator to a coordinator, and the kinds of the messages that the two kinds of agents got."""

    connections: AgentConnections
    coordinator: str
    member: str
    """Address of an agent that only the operator can call."""
    heard: list[str]
    called: list[str]
    """Kinds of the messages that the operator has sent to the member itself."""

    def call(self, replica: str, kind: type = protocol.Prepare) -> Call:
        found: Call = getattr(self.connections.views(UID)[replica], CALLS[kind])
        return found

    async def ended(self, *replicas: str, kind: type = protocol.Prepare) -> list[object]:
        """Return the answers of the replicas, or the errors of the calls."""
        calls = lambda: [self.call(replica, kind) for replica in replicas]  # noqa: E731
        await until_async(lambda: all(call.done_at is not None for call in calls()), "answers", calls)
        return [call.reply or call.error for call in calls()]


@contextlib.asynccontextmanager
async def job(folder: Path, pass_on: PassOn, report: protocol.Report) -> AsyncIterator[Job]:
    heard: list[str] = []
    called: list[str] = []

    async def coordinator(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        heard.append(type(message).__name__)
        told = {protocol.Watch: report, protocol.Prepare: prepared(COORDINATOR)}
        if isinstance(message, protocol.Relay):
            await pass_on(message, lambda relayed: writer.write(protocol.encode(relayed)))
        else:
            writer.write(protocol.encode(told.get(type(message), protocol.Accepted(1, "c1"))))
        await writer.drain()

    async def follower(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        called.append(type(message).__name__)
        reply = prepared("r1") if isinstance(message, protocol.Prepare) else protocol.Accepted(1, "c1")
        writer.write(protocol.encode(reply))
        await writer.drain()

    connections = AgentConnections(Heard())
    await connections.open(UID, CREATED, MASTER)
    async with agent(coordinator, folder, requests=100) as at, agent(follower, folder, requests=100) as other:
        connections.watch(UID, {COORDINATOR: at})
        await until_async(lambda: connections.views(UID)[COORDINATOR].connected, "a stream")
        async with asyncio.timeout(LIMIT):
            yield Job(connections, at, other, heard, called)
        connections.close()


async def answers(message: protocol.Relay, back: Callable[[protocol.Relayed], None]) -> None:
    """Pass a message on as an agent does, to members that answer."""
    asked = protocol.decode(message.line.encode())
    for to in message.to:
        reply = prepared(to.replica) if isinstance(asked, protocol.Prepare) else protocol.Accepted(1, "c1")
        back(protocol.Relayed(to.replica, line(reply), request=message.request))


async def nothing(_: protocol.Relay, __: Callable[[protocol.Relayed], None]) -> None:
    """Pass nothing on, and say nothing."""


def test_a_round_begins_over_one_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path, answers, coordinators(member("r1"), member("r2"))) as told:
            for message in (PREPARE, ASSIGN):
                to = {COORDINATOR: told.coordinator, "r1": NOBODY, "r2": NOBODY}
                told.connections.send(UID, [Send(*entry, message) for entry in to.items()])
                replies = await told.ended(*to, kind=type(message))
                expected = list(map(prepared, to)) if message is PREPARE else [protocol.Accepted(1, "c1")] * 3
                assert replies == expected
            assert sorted(told.heard) == ["Assign", "Prepare", "Relay", "Relay", "Watch"]

    asyncio.run(scenario())


def test_who_the_coordinator_can_not_call_is_called_by_the_operator_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RELAY_SECONDS", 100 * LIMIT)

    async def cannot(message: protocol.Relay, back: Callable[[protocol.Relayed], None]) -> None:
        back(protocol.Relayed("r1", error="can't be reached", request=message.request))

    async def scenario() -> None:
        async with job(tmp_path, cannot, coordinators(member("r1"), member("r2"))) as told:
            told.connections.send(UID, [Send("r1", told.member, PREPARE), Send("r2", NOBODY, PREPARE)])
            assert await told.ended("r1") == [prepared("r1")]
            assert told.called == ["Prepare"]
            assert told.call("r2").done_at is None, "r2 may still answer the coordinator"

    asyncio.run(scenario())


def test_silence_behind_the_coordinator_counts_only_once_the_operator_asks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ask = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(relays, "RELAY_SECONDS", 0.1)

    async def silent(_: protocol.Relay, __: Callable[[protocol.Relayed], None]) -> None:
        begun.set()

    async def scenario() -> None:
        async with job(tmp_path, silent, coordinators(member("r1"))) as told:
            original = told.connections._call

            async def gated(*arguments: object) -> None:
                await ask.wait()
                await original(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(told.connections, "_call", gated)
            told.connections.send(UID, [Send("r1", told.member, PREPARE)])
            await begun.wait()
            assert told.call("r1").sent_at is None
            assert told.call("r1").waited_for(1e12) == 0.0
            await until_async(lambda: told.call("r1").sent_at is not None, "the operator's own call")
            ask.set()
            assert await told.ended("r1") == [prepared("r1")]

    asyncio.run(scenario())


def test_a_late_answer_to_an_earlier_request_is_not_taken_for_one_to_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator passes on what a member has answered to an older claim, after a newer one was sent."""
    monkeypatch.setattr(relays, "RELAY_SECONDS", 0.2)
    earlier: list[protocol.Relay] = []

    async def late(message: protocol.Relay, back: Callable[[protocol.Relayed], None]) -> None:
        if earlier:
            back(protocol.Relayed("r1", line(protocol.Accepted(1, "c1")), request=earlier[0].request))
        earlier.append(message)

    async def scenario() -> None:
        async with job(tmp_path, late, coordinators(member("r1"))) as told:
            for message in (PREPARE, ASSIGN):
                told.connections.send(UID, [Send("r1", told.member, message)])
                await told.ended("r1", kind=type(message))
            assert told.called == ["Prepare", "Assign"]

    asyncio.run(scenario())


@pytest.mark.parametrize("forged", [prepared("r2"), prepared("r1", round=2), protocol.Accepted(0, "c0")], ids=str)
def test_an_answer_that_is_not_the_members_to_this_request_is_no_answer(
    tmp_path: Path, forged: protocol.Message
) -> None:
    async def forges(message: protocol.Relay, back: Callable[[protocol.Relayed], None]) -> None:
        back(protocol.Relayed("r1", line(forged), request=message.request))

    async def scenario() -> None:
        async with job(tmp_path, forges, coordinators(member("r1"))) as told:
            told.connections.send(UID, [Send("r1", told.member, PREPARE)])
            assert await told.ended("r1") == [prepared("r1")]
            assert told.called == ["Prepare"]

    asyncio.run(scenario())


def test_when_the_coordinator_dies_the_operator_asks_the_others_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RELAY_SECONDS", 100 * LIMIT)

    async def dies(_: protocol.Relay, __: Callable[[protocol.Relayed], None]) -> None:
        raise ConnectionResetError

    async def scenario() -> None:
        async with job(tmp_path, dies, coordinators(member("r1"))) as told:
            told.connections.send(UID, [Send("r1", told.member, PREPARE)])
            assert await told.ended("r1") == [prepared("r1")]
            assert told.called == ["Prepare"]

    asyncio.run(scenario())


def test_the_coordinator_passes_nothing_on_to_members_that_it_has_lost_or_does_not_know(tmp_path: Path) -> None:
    """The operator knows that it would have to ask them itself. A worker's failure leaves the agent in contact."""
    lost, failed = protocol.FailureReason.MEMBER_LOST, protocol.FailureReason.WORKER_FAILED
    report = coordinators(member("lost", lost), member("failed", failed))
    known = Coordinator().after(report)
    streams = {COORDINATOR, "standby"}
    names = ("lost", "failed", "unknown", "standby", COORDINATOR)
    assert [name for name in names if known.passes_on(name, streams)] == ["failed"]
    assert not known.passes_on("failed", {"standby"}), "there is no stream to the coordinator"
    assert known.after(dataclasses.replace(report, coordinator=False, members={})) == known, "for the Assign"


def test_no_line_is_read_before_the_answer_in_the_last_one_was_taken() -> None:
    """Otherwise an agent could fill the operator's memory."""

    class Wire:
        async def send(self, message: protocol.Message) -> None:
            self.sent = message

    async def scenario() -> None:
        calls = StreamCalls(wire := Wire())  # type: ignore[arg-type]
        async with calls.relay(protocol.Relay(UID, "", ()), LIMIT) as next_answer:
            sent: protocol.Relay = wire.sent  # type: ignore[assignment]
            assert calls.answered(protocol.Relayed("r1", request=sent.request))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(calls.taken(), 0.01)
            assert (await next_answer()).replica == "r1"
            await calls.taken()
            assert calls.answered(protocol.Relayed("r1", request=sent.request))
            waits = asyncio.create_task(calls.taken())
            await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT):
            await waits, "nobody waits for the answer any more"
            assert calls.answered(protocol.Relayed("r1", request=sent.request))
            await calls.taken()

    asyncio.run(scenario())
