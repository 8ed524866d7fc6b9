"""One watch stream against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import CREATED, LIMIT, MASTER, UID, Heard, agent, report
from builders.until import until_async
from concertina.agents.allowance import SHARE, Allowance
from concertina.agents.authority import Authority
from concertina.agents.calls import ConnectionIdentity
from concertina.agents.connections import AgentConnections
from concertina.agents.streams import AT_LAST_SECONDS, Lost, OnLost, OnReport, StreamEnd, follow, silence


def following(
    address: str, on_report: OnReport, on_lost: OnLost, allowance: Allowance | None = None
) -> asyncio.Task[None]:
    context = Authority(MASTER, UID, CREATED).client_context()
    identity = ConnectionIdentity(UID, context, allowance=allowance or Allowance())
    watch = protocol.Watch(UID, changes=True)
    return asyncio.create_task(follow(identity, address, lambda: watch, lambda _: None, on_report, on_lost))


def test_a_stream_that_is_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 0.3)

    async def once(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.encode(report()))
        await writer.drain()
        await asyncio.sleep(LIMIT)

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        async with agent(once, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(
                lambda: connections.views(UID)["r0"].connected, "a stream", lambda: connections.views(UID)
            )
            await until_async(
                lambda: not connections.views(UID)["r0"].connected,
                "a stream that is lost",
                lambda: connections.views(UID),
            )
            assert connections.views(UID)["r0"].lost_at is not None
            assert connections.views(UID)["r0"].refusal is None
            assert not connections.views(UID)["r0"].closed
            connections.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n",
        b'{"v": 1, "kind": "Report", "body": {"replica": "r0", "progress": {"loss": 1' + b"0" * 400 + b"}}}\n",
        b'{"v": 1, "kind": "Report", "body": ' + b'{"replica":' * 5000 + b"\n",
    ],
    ids=["nested", "overflow", "deep"],
)
def test_whatever_an_agent_sends_its_stream_is_lost_by_name_and_opened_again(line: bytes, tmp_path: Path) -> None:
    """An agent may be hostile: an unforeseen exception must not end a stream that counts as open."""
    streams = 0

    async def answer(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        nonlocal streams
        streams += 1
        writer.write(protocol.encode(report()) + (line if streams == 1 else b""))
        await writer.drain()
        await asyncio.sleep(LIMIT)

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        async with agent(answer, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(
                lambda: streams == 2, "a second stream", lambda: streams
            )  # So the operator noticed the loss of the first stream.
            await until_async(
                lambda: connections.views(UID)["r0"].connected, "a stream", lambda: connections.views(UID)
            )
            connections.close()

    asyncio.run(scenario())


async def flood(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
    lines = b"".join(protocol.encode(report(step)) for step in range(500))
    while True:
        writer.write(lines)
        await writer.drain()


def test_an_agent_that_floods_is_heard_as_far_as_its_namespace_has_time_left(tmp_path: Path) -> None:
    """Here, each line costs as much processor time as becomes available in four seconds."""

    async def scenario() -> None:
        costs, now = itertools.count(step=4 * SHARE), 1000.0
        gate, heard = asyncio.Event(), list[protocol.Report]()

        async def sleep(seconds: float) -> None:
            nonlocal now
            if now + seconds > 1020.0:
                await gate.wait()
            now += seconds

        allowance = Allowance(clock=lambda: now, processor_seconds=lambda: next(costs), sleep=sleep)
        async with agent(flood, tmp_path) as address:
            task = following(address, heard.append, lambda lost: None, allowance)
            await until_async(lambda: len(heard) >= 7, "what is allowed", lambda: len(heard))
            await asyncio.sleep(0.05)
            assert len(heard) == 8, "for the ten seconds before and for twenty, the last line in advance"
            task.cancel()

    asyncio.run(scenario())


def test_what_a_line_waits_for_in_this_operator_is_no_silence_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 0.1)

    async def scenario() -> None:
        gate, waits, lost = asyncio.Event(), asyncio.Event(), list[Lost]()

        async def sleep(_: float) -> None:
            waits.set()
            await gate.wait()

        allowance = Allowance(clock=lambda: 0.0, processor_seconds=itertools.count(step=1000.0).__next__, sleep=sleep)
        async with agent(flood, tmp_path) as address:
            task = following(address, lambda report: None, lost.append, allowance)
            await waits.wait()
            await asyncio.sleep(0.2 + 2 * AT_LAST_SECONDS)
            assert not lost
            task.cancel()

    asyncio.run(scenario())


def test_a_line_that_is_said_again_keeps_a_stream_alive_and_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 0.5)
    said = 0

    async def repeat(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        nonlocal said
        for step in (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0):
            writer.write(protocol.encode(report(step)))
            await writer.drain()
            await asyncio.sleep(0.1)
            said += 1
        await asyncio.sleep(LIMIT)

    async def scenario() -> None:
        heard, lost = list[protocol.Report](), list[Lost]()
        async with agent(repeat, tmp_path) as address:
            task = following(address, heard.append, lost.append)
            await until_async(lambda: said == 12, "all that it says", lambda: said)
            assert [each.progress.step for each in heard if each.progress] == [0, 1, 0]
            assert not lost
            await until_async(lambda: bool(lost), "its silence", lambda: lost)
            assert lost[0].end is StreamEnd.SILENT
            task.cancel()

    asyncio.run(scenario())


def test_for_how_long_an_agent_may_be_silent() -> None:
    rarely = protocol.Watch(UID, changes=True, idle_beat=5.0)
    assert silence(rarely, report(state=protocol.State.IDLE)) == 15.0
    assert silence(rarely, report(state=protocol.State.RUNNING)) == 3.0
    assert silence(rarely, None) == 3.0
    assert silence(protocol.Watch(UID), report(state=protocol.State.IDLE)) == 3.0
