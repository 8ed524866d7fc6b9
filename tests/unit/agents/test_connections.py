"""Calls and watch streams against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import os
import resource
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.counted import counted
from builders.until import until_async
from concertina.agents import calls as calls_module
from concertina.agents import connections as module
from concertina.agents.authority import Authority
from concertina.agents.calls import Identity
from concertina.agents.connections import AgentConnection, AgentConnections
from concertina.agents.streams import GAP_SECONDS, Lost, OnLost, OnReport, StreamEnd, follow, silence
from concertina.plan.actions import Send
from concertina.plan.observed import AgentView, Call, ConnectionRefusal

LIMIT = 20.0  # only to give up
MASTER, UID, CREATED = b"m" * 32, "u1", 1_700_000_000.0
PREPARE = protocol.Prepare(UID, 1, "c1", ())
ASSIGN = protocol.Assign(UID, 1, "c1", (), "127.0.0.1:1", protocol.Restore(protocol.RestoreSource.FRESH))
Answer = Callable[[protocol.Message, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Heard:
    """What the connections tell."""

    changes: list[bool] = field(default_factory=list)

    def __call__(self, uid: str, at_once: bool) -> None:
        assert uid == UID
        self.changes.append(at_once)


@contextlib.asynccontextmanager
async def agent(
    answer: Answer, folder: Path, port: int = 0, master: bytes = MASTER, requests: int = 1
) -> AsyncIterator[str]:
    """An agent that hands each request to `answer`, so many of a connection; its address."""
    for name, content in Authority(master, UID, CREATED).secret_data().items():
        (folder / name).write_bytes(base64.b64decode(content))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            for _ in range(requests):
                if line := await reader.readline():
                    await answer(protocol.decode(line), writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


def report(step: int = 0, state: str = "idle", instance: str = "i1", ready: bool = True) -> protocol.Report:
    progress = protocol.Progress(step, 10, 1.0, 1.0, 1.0, step, "training", 1.0)
    return protocol.Report("r0", instance, ready, 0, "", state, progress=progress)


async def forever(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
    """Reports again and again."""
    while True:
        writer.write(protocol.encode(report()))
        await writer.drain()
        await asyncio.sleep(0.05)


def remembered(asked: list[protocol.Message]) -> Answer:
    """The same, of one that keeps what it was asked."""

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        asked.append(message)
        await forever(message, writer)

    return answer


def following(address: str, on_report: OnReport, on_lost: OnLost) -> asyncio.Task[None]:
    identity = Identity(UID, Authority(MASTER, UID, CREATED).client_context())
    watch = protocol.Watch(UID, changes=True)
    return asyncio.create_task(follow(identity, address, lambda: watch, lambda _: None, on_report, on_lost))


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
                with contextlib.suppress(OSError):  # those that were free below it
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


def stream_ends() -> Counter[str]:
    return Counter({end: int(counted("concertina_agent_stream_ends_total", reason=end)) for end in StreamEnd})


def streams(connections: AgentConnections) -> dict[str, float]:
    """By state, those that there are."""
    connections.set_gauges()
    states = {state.value: counted("concertina_agent_streams", state=state) for state in module.StreamState}
    return {state: count for state, count in states.items() if count}


def test_a_stream_is_connected_lost_at_once_when_it_breaks_and_opened_again(tmp_path: Path) -> None:
    before = stream_ends()

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            assert streams(connections) == {"opening": 1}
            await until_async(lambda: view().connected, "a stream", view)
            assert streams(connections) == {"open": 1}
            assert view().report == report()
            assert view().ready_at is not None
        await until_async(lambda: not view().connected, "a stream that is lost", view)
        assert view().lost_at is not None
        assert view().closed
        assert view().report is not None
        assert streams(connections) == {"lost": 1}
        await until_async(lambda: view().refusal is ConnectionRefusal.NOT_LISTENING, "a refusal", view)
        async with agent(forever, tmp_path, port=int(address.split(":")[1])):
            await until_async(lambda: view().connected, "a stream", view)
            assert view().lost_at is None
            assert view().refusal is None
            connections.watch(UID, {})
            assert not view().connected
            assert streams(connections) == {}
        connections.close()

    asyncio.run(scenario())
    ends = stream_ends() - before
    assert (ends.pop("not_listening") >= 1, ends) == (True, {"closed": 1, "not_wanted": 1})


def test_a_round_is_under_way_with_the_first_progress_of_what_this_operator_assigned() -> None:
    assign = Call(3, "c", sent_at=1.0)
    view = AgentView(assign=assign)
    told = dataclasses.replace(report(step=1), round=3, claim="c")
    silent = dataclasses.replace(told, progress=None)
    assert module._assigned(view, silent) is None
    assert module._assigned(view, told) is assign
    assert module._assigned(dataclasses.replace(view, report=silent), told) is assign
    assert module._assigned(dataclasses.replace(view, report=report(step=1)), told) is assign, "of the round before"
    assert module._assigned(dataclasses.replace(view, report=told), told) is None
    assert module._assigned(view, dataclasses.replace(told, claim="another's")) is None
    assert module._assigned(AgentView(), told) is None


def test_an_agent_of_another_master_key_is_told_from_none_and_from_silence(tmp_path: Path) -> None:
    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        heard = Heard()
        connections = AgentConnections(heard, clock=lambda: now, wall=lambda: now)
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path, master=b"n" * 32) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: view().refusal is ConnectionRefusal.OTHER_KEY, "a refusal", view)
            assert view().alive
            assert not view().connected
            now += 1.0
            await asyncio.sleep(0.5)  # tries again and again
            assert len(heard.changes) == 1
            assert view().lost_at is None
        await until_async(lambda: view().refusal is ConnectionRefusal.NOT_LISTENING, "a refusal", view)
        assert view().lost_at == 1001.0, "it lived up to then"
        async with agent(forever, tmp_path, port=int(address.split(":")[1])):
            await until_async(lambda: view().connected, "a stream", view)
            assert view().refusal is None
        connections.close()

    asyncio.run(scenario())


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


def test_progress_alone_does_not_matter_at_once_but_a_change_of_state_does(tmp_path: Path) -> None:
    lines = [report(step=1), report(step=2), report(step=2), report(step=3, state="failed"), report(step=10)]
    go = asyncio.Queue[None]()

    async def play(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        for line in lines:
            await go.get()
            writer.write(protocol.encode(line))
            await writer.drain()
        await asyncio.sleep(LIMIT)

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(play, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            for line in lines:
                go.put_nowait(None)
                await until_async(
                    lambda line=line: connections.views(UID)["r0"].report == line,
                    "the report",
                    lambda: connections.views(UID),
                )
                await asyncio.sleep(0.02)
            assert heard.changes == [True, False, True, True]
            connections.close()

    asyncio.run(scenario())


def test_garbage_ends_a_stream_and_a_call(tmp_path: Path) -> None:
    async def garbage(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        writer.write(b"{}\n")
        await writer.drain()

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(garbage, tmp_path) as address:
            connections.send(UID, [Send("r0", address, PREPARE)])
            await until_async(lambda: bool(heard.changes), "a change", lambda: heard.changes)
            call = connections.views(UID)["r0"].prepare
            assert call is not None
            assert "not understood" in call.error
            connections.watch(UID, {"r0": address})
            await asyncio.sleep(0.2)
            assert not connections.views(UID)["r0"].connected
            connections.close()

    asyncio.run(scenario())


def test_a_job_that_is_forgotten_while_its_pass_is_under_way_gets_no_stream_and_no_call() -> None:
    async def main() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        connections.forget(UID)
        connections.watch(UID, {"a": "127.0.0.1:1"})
        assert not connections.send(UID, [Send("a", "127.0.0.1:1", PREPARE)])
        assert connections.views(UID) == {}

    asyncio.run(main())


def test_time_in_which_the_operator_stood_still_does_not_count_against_an_agent(tmp_path: Path) -> None:
    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(Heard(), clock=lambda: now, wall=lambda: now)
        await connections.open(UID, CREATED, MASTER)
        async with agent(forever, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(
                lambda: connections.views(UID)["r0"].connected, "a stream", lambda: connections.views(UID)
            )
        await until_async(
            lambda: not connections.views(UID)["r0"].connected, "a stream that is lost", lambda: connections.views(UID)
        )
        assert connections.views(UID)["r0"].lost_at == 1000.0
        now += 1.0
        assert connections.views(UID)["r0"].lost_at == 1000.0
        now += 60.0
        assert connections.views(UID)["r0"].lost_at == 1060.0
        connections.close()

    asyncio.run(scenario())


def test_a_stream_that_is_not_wanted_any_more_ends_whatever_it_is_about_to_hear(tmp_path: Path) -> None:
    """Cancelled in the same turn of the event loop in which its host refuses it, too."""

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        for turns in range(40):
            connections.watch(UID, {"r0": "127.0.0.1:1"})
            (stream,) = (task for task in asyncio.all_tasks() if task.get_name() == "watch r0")
            for _ in range(turns % 10):
                await asyncio.sleep(0)
            connections.watch(UID, {})
            done, _ = await asyncio.wait([stream], timeout=1)
            assert done, turns
        connections.close()

    asyncio.run(scenario())


def test_a_handshake_waits_its_turn_and_that_speaks_against_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES", 1)
    monkeypatch.setattr(calls_module, "DIAL_SECONDS", LIMIT)
    waiting: list[asyncio.StreamWriter] = []

    async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)

    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(lambda uid, at_once: None, clock=lambda: now, wall=lambda: now)
        for uid in ("slow", UID):
            await connections.open(uid, CREATED, MASTER)
        silent = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        connections.watch("slow", {"s0": f"{host}:{port}"})
        await until_async(lambda: connections.views("slow")["s0"].wanted_at, "a handshake", connections)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            connections.send(UID, [Send("r0", address, ASSIGN)])
            made_for = connections.views(UID)["r0"].assign
            await asyncio.sleep(0.3)
            assert not view().connected
            assert view().silent_since is None
            assert (waits := view().assign)
            assert waits.sent_at is None
            now += 1.0
            waiting[0].transport.abort()
            await until_async(lambda: view().connected, "a stream", view)
            await until_async(lambda: (found := view().assign) and found.done_at, "the end of the call", view)
            sent = view().assign
            assert made_for is not None
            assert sent is not None
            assert sent.sent_at == pytest.approx(made_for.sent_at + 1.0)
            connections.close()
        silent.close()

    asyncio.run(scenario())


def test_a_stream_that_waits_its_turn_to_be_opened_again_is_silent_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES", 1)
    monkeypatch.setattr(calls_module, "DIAL_SECONDS", LIMIT)
    waiting: list[asyncio.StreamWriter] = []
    open_streams: list[asyncio.StreamWriter] = []

    async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)

    async def reports(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        open_streams.append(writer)
        writer.write(protocol.encode(report()))
        await forever(_, writer)

    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(lambda uid, at_once: None, clock=lambda: now, wall=lambda: now)
        for uid in ("slow", UID):
            await connections.open(uid, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        silent = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        async with agent(reports, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: view().connected, "a stream", view)
            connections.watch("slow", {"s0": f"{host}:{port}"})
            await until_async(lambda: connections.views("slow")["s0"].wanted_at, "a handshake", connections)
            open_streams[0].transport.abort()
            await until_async(lambda: view().queued_at is not None, "a stream that waits its turn", view)
            now += 1.5  # longer ones count as a stall
            assert view().silent_for(now) == 0.0
            connections.watch("slow", {})
            await until_async(lambda: view().connected, "the stream again", view)
            connections.close()
        silent.close()

    asyncio.run(scenario())


def test_a_clock_that_is_set_makes_no_silence_longer_or_shorter(tmp_path: Path) -> None:
    now, offset = 1000.0, 1_000_000.0

    async def scenario() -> None:
        nonlocal now, offset
        connections = AgentConnections(Heard(), clock=lambda: now, wall=lambda: now + offset)
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: view().connected, "a stream", view)
        await until_async(lambda: not view().connected, "a stream that is lost", view)
        for change in (-3600.0, 7200.0):
            now, offset = now + 1.0, offset + change
            found = view()
            assert found.lost_at is not None
            assert found.ready_at is not None
            assert now + offset - found.lost_at == pytest.approx(now - 1000.0)
            assert now + offset - found.ready_at == pytest.approx(now - 1000.0)
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


def test_what_is_said_to_many_is_said_to_some_of_them_first_to_those_that_are_heard() -> None:
    """4096 by 64 connections, of whom each has 63 others to tell."""
    heard = {"r7", "r50", "r99"}
    connections = {f"r{i}": AgentConnection(AgentView(connected=f"r{i}" in heard)) for i in range(100)}
    job = module._Job(Identity(UID, ssl.create_default_context()), connections)
    batch = [(Send(name, name, PREPARE), Call(1, "c1", sent_at=0.0)) for name in connections]
    parts = module._parts(batch, job)
    assert [len(part) for part in parts] == [10] * 10
    assert {part[0][0].replica for part in parts[:3]} == heard
    assert sorted(send.replica for part in parts for send, _ in part) == sorted(connections)


def test_an_answer_that_is_passed_on_is_whole_however_long(tmp_path: Path) -> None:
    """Of a candidate that reaches a hundred others."""
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
        identity = Identity(UID, Authority(MASTER, UID, CREATED).client_context())
        async with agent(passed_on, tmp_path) as address:
            to = {"r1": address, "r2": "127.0.0.1:1"}
            line = protocol.encode(PREPARE).decode().rstrip("\n")
            assert [each async for each in calls_module.relay(identity, address, line, to)] == [("r1", prepared)]

    asyncio.run(scenario())


def test_one_that_was_to_pass_something_on_and_babbles_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "RELAY_SECONDS", 0.3)

    async def babble(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(protocol.encode(protocol.Relayed("nobody", "{}")))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        identity = Identity(UID, Authority(MASTER, UID, CREATED).client_context())
        async with agent(babble, tmp_path) as address, asyncio.timeout(LIMIT):
            assert [each async for each in calls_module.relay(identity, address, "{}", {"r1": address})] == []

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


def test_the_more_jobs_there_are_the_rarer_are_numbers_of_each(tmp_path: Path) -> None:
    asked: list[protocol.Message] = []

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        async with agent(remembered(asked), tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: len(asked) == 1, "a stream", lambda: asked)
            for number in range(199):
                await connections.open(f"another-{number}", CREATED, MASTER)
            connections.watch(UID, {})
            connections.watch(UID, {"r0": address})
            await until_async(lambda: len(asked) == 2, "another stream", lambda: asked)
        connections.close()

    asyncio.run(scenario())
    assert [watch.pace for watch in asked if isinstance(watch, protocol.Watch)] == [0.25, 2.0]


def test_who_waits_for_the_first_round_speaks_rarely_and_who_is_left_out_of_it_does_no_more(tmp_path: Path) -> None:
    asked: list[protocol.Message] = []

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        async with agent(remembered(asked), tmp_path) as address:
            for waits in (True, True, False, False):
                connections.watch(UID, {"r0": address}, waits)
                await until_async(lambda: connections.views(UID)["r0"].connected, "a stream", lambda: asked)
        connections.close()

    asyncio.run(scenario())
    assert [watch.idle_beat for watch in asked if isinstance(watch, protocol.Watch)] == [5.0, 1.0]


def test_for_how_long_an_agent_may_be_silent() -> None:
    rarely = protocol.Watch(UID, changes=True, idle_beat=5.0)
    assert silence(rarely, report(state=protocol.State.IDLE)) == 15.0
    assert silence(rarely, report(state=protocol.State.RUNNING)) == 3.0
    assert silence(rarely, None) == 3.0
    assert silence(protocol.Watch(UID), report(state=protocol.State.IDLE)) == 3.0
