"""One watch stream against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import CREATED, LIMIT, MASTER, UID, Heard, agent, report
from builders.until import until_async
from concertina.agents.authority import Authority
from concertina.agents.calls import Identity
from concertina.agents.connections import AgentConnections
from concertina.agents.streams import GAP_SECONDS, Lost, OnLost, OnReport, StreamEnd, follow, silence


def following(address: str, on_report: OnReport, on_lost: OnLost) -> asyncio.Task[None]:
    identity = Identity(UID, Authority(MASTER, UID, CREATED).client_context())
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
    """As a hostile one may: an exception that nobody foresaw must not end a stream while it counts as open."""
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
            )  # so the first was noticed to be lost
            await until_async(
                lambda: connections.views(UID)["r0"].connected, "a stream", lambda: connections.views(UID)
            )
            connections.close()

    asyncio.run(scenario())


def test_an_agent_that_says_lines_without_a_pause_is_heard_at_a_pace(tmp_path: Path) -> None:
    """What it keeps the operator from is its own reports."""

    async def flood(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        lines = b"".join(protocol.encode(report(step)) for step in range(500))
        while True:
            writer.write(lines)
            await writer.drain()

    async def scenario() -> None:
        loop, heard = asyncio.get_running_loop(), list[protocol.Report]()
        async with agent(flood, tmp_path) as address:
            begun = loop.time()
            task = following(address, heard.append, lambda lost: None)
            await until_async(lambda: len(heard) >= 20, "some reports", lambda: len(heard))
            assert len(heard) <= 1 + (loop.time() - begun) / GAP_SECONDS
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
