"""Views of agents from calls and streams together, against a real TLS server that speaks the protocol's lines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import concertina_protocol as protocol
from builders.answering import ASSIGN, CREATED, LIMIT, MASTER, PREPARE, UID, Answer, Heard, agent, forever, report
from builders.counted import counted
from builders.until import until_async
from concertina.agents import calls as calls_module
from concertina.agents import connections as module
from concertina.agents.authority import Authority
from concertina.agents.connections import AgentConnections
from concertina.agents.streams import StreamEnd
from concertina.plan.actions import Send
from concertina.plan.facts import constants
from concertina.plan.observed import AgentView, Call, ConnectionRefusal
from concertina_protocol.connection import abort


def remembered(asked: list[protocol.Message]) -> Answer:
    """Return a server's answer that appends the requests to `asked` and behaves like an agent otherwise."""

    async def answer(message: protocol.Message, writer: asyncio.StreamWriter) -> None:
        asked.append(message)
        await forever(message, writer)

    return answer


def stream_ends() -> Counter[str]:
    return Counter({end: int(counted("concertina_agent_stream_ends_total", reason=end)) for end in StreamEnd})


def streams(connections: AgentConnections) -> dict[str, float]:
    """Return the number of streams by state, for states that occur."""
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
    reported = dataclasses.replace(report(step=1), round=3, claim="c")
    silent = dataclasses.replace(reported, progress=None)
    assert module._assigned(view, silent) is None
    assert module._assigned(view, reported) is assign
    assert module._assigned(dataclasses.replace(view, report=silent), reported) is assign
    assert module._assigned(dataclasses.replace(view, report=report(step=1)), reported) is assign, "of the round before"
    assert module._assigned(dataclasses.replace(view, report=reported), reported) is None
    assert module._assigned(view, dataclasses.replace(reported, claim="another's")) is None
    assert module._assigned(AgentView(), reported) is None


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


@pytest.mark.parametrize(("waits", "changes"), [(True, [False, False, True, True, True]), (False, [True] * 5)])
def test_an_agent_that_only_starts_decides_nothing_before_the_first_round(
    tmp_path: Path, waits: bool, changes: list[bool]
) -> None:
    """The first report, and what storage says, wait for the next pass; readiness and its end, or a reason, do not."""
    starting = protocol.Report("r0", "i1", ready=False, round=0, claim="", state="idle", takes_calls=True)
    ready = dataclasses.replace(starting, ready=True)
    lines = [
        starting,
        dataclasses.replace(starting, storage=protocol.Storage("Ready")),
        ready,
        starting,
        dataclasses.replace(starting, startup_error="no module"),
    ]

    async def play(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        for line in lines:
            await go.get()
            writer.write(protocol.encode(line))
            await writer.drain()
        await asyncio.sleep(LIMIT)

    go = asyncio.Queue[None]()

    async def scenario() -> None:
        heard = Heard()
        connections = AgentConnections(heard)
        await connections.open(UID, CREATED, MASTER)
        async with agent(play, tmp_path) as address:
            connections.watch(UID, {"r0": address}, waits)
            for count, line in enumerate(lines, 1):
                go.put_nowait(None)
                await until_async(
                    lambda line=line: connections.views(UID)["r0"].report == line,
                    "the report",
                    lambda: connections.views(UID),
                )
                await until_async(lambda count=count: len(heard.changes) == count, "a word", lambda: heard.changes)
            assert heard.changes == changes
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
            assert "invalid message" in call.error
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
        now += 0.9
        assert connections.views(UID)["r0"].lost_at == 1000.0
        now += 60.0
        assert connections.views(UID)["r0"].lost_at == 1060.0
        connections.close()

    asyncio.run(scenario())


def test_a_stream_that_is_not_wanted_any_more_says_nothing_against_its_agent(tmp_path: Path) -> None:
    """Close a stream while it is lost. Without a stream, the operator can't know whether the agent answers again."""

    async def scenario() -> None:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: view().connected, "a stream", view)
        await until_async(lambda: view().refusal is ConnectionRefusal.NOT_LISTENING, "a refusal", view)
        connections.watch(UID, {})
        assert view() == AgentView(report=report(), ready_at=view().ready_at)
        connections.close()

    asyncio.run(scenario())


def test_a_stream_that_is_not_wanted_any_more_ends_whatever_it_is_about_to_hear(tmp_path: Path) -> None:
    """The stream is cancelled in the turn of the event loop in which its host also refuses it."""

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


@contextlib.asynccontextmanager
async def a_handshake_without_end(connections: AgentConnections) -> AsyncIterator[None]:
    """Hold a handshake of another job open until the block ends."""
    held: list[asyncio.StreamWriter] = []

    async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    await connections.open("slow", CREATED, MASTER)
    silent = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    connections.watch("slow", {"s0": f"{host}:{port}"})
    try:
        await until_async(lambda: connections.views("slow")["s0"].wanted_at, "a handshake", connections)
        yield
    finally:
        connections.watch("slow", {})
        silent.close()
        for writer in held:
            abort(writer)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one handshake at a time, which is not aborted, and keeps its turn until it has ended."""
    monkeypatch.setattr(module, "HANDSHAKES", 1)
    monkeypatch.setattr(calls_module, "DIAL_SECONDS", LIMIT)
    monkeypatch.setattr(calls_module, "SLOT_SECONDS", LIMIT)


@pytest.mark.usefixtures("one_at_a_time")
def test_a_handshake_waits_its_turn_and_that_speaks_against_nobody(tmp_path: Path) -> None:
    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(lambda uid, at_once: None, clock=lambda: now, wall=lambda: now)
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(forever, tmp_path) as address:
            async with a_handshake_without_end(connections):
                connections.watch(UID, {"r0": address})
                connections.send(UID, [Send("r0", address, ASSIGN)])
                made_for = connections.views(UID)["r0"].assign
                await asyncio.sleep(0.3)
                assert not view().connected
                assert (waits := view().assign)
                assert waits.sent_at is None
                now += 0.9
                assert view().silent_for(now) == 0.0
            await until_async(lambda: view().connected, "a stream", view)
            await until_async(lambda: (found := view().assign) and found.done_at, "the end of the call", view)
            sent = view().assign
            assert made_for is not None
            assert sent is not None
            assert sent.sent_at == pytest.approx(made_for.sent_at + 0.9)
            connections.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("one_at_a_time")
def test_who_is_silent_in_a_handshake_keeps_nobody_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent agents of a hundred jobs of another namespace wait for the only slot.

    Each gives it back while it is silent, and an agent of this namespace is the next but one.
    """
    monkeypatch.setattr(calls_module, "SLOT_SECONDS", 0.02)
    mute_jobs = [f"mute-{number}" for number in range(100)]

    async def scenario() -> None:
        connections = AgentConnections(lambda uid, at_once: None)

        def begun() -> int:
            views = (connections.views(uid)["s0"] for uid in mute_jobs)
            return sum(view.wanted_at is not None for view in views)

        held: list[asyncio.StreamWriter] = []

        async def says_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        context = Authority(MASTER, UID, CREATED).client_context()
        monkeypatch.setattr(module, "_client_context", lambda *of: context)
        await connections.open(UID, CREATED, MASTER, "honest")
        silent = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        async with agent(forever, tmp_path) as address:
            for uid in mute_jobs:
                await connections.open(uid, CREATED, MASTER, "mute")
                connections.watch(uid, {"s0": f"{host}:{port}"})
            await until_async(lambda: begun() >= 1, "a handshake", begun)
            before = begun()
            connections.watch(UID, {"r0": address})
            await until_async(lambda: connections.views(UID)["r0"].connected, "a stream", connections)
            assert begun() < before + len(mute_jobs) // 2
            connections.close()
        silent.close()
        for writer in held:
            abort(writer)

    asyncio.run(scenario())


@pytest.mark.parametrize("pause", [0.9, 1.3, 1.9])
def test_a_pause_of_the_operator_is_no_time_without_an_answer(pause: float) -> None:
    """The operator reads no answer while it is paused, so a pause does not show that a member answers nobody."""
    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(lambda uid, at_once: None, clock=lambda: now, wall=lambda: now)
        async with a_handshake_without_end(connections):
            now += pause
            silent_for = connections.views("slow")["s0"].silent_for(now)
            assert silent_for is not None
            assert silent_for < constants.UNANSWERED
        connections.close()

    asyncio.run(scenario())


def test_a_host_that_answers_no_dial_is_silent_from_the_first_attempt() -> None:
    """Open a stream to a host that is switched off, or to which a network drops all packets."""
    now, before = 1000.0, stream_ends()

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(Heard(), clock=lambda: now, wall=lambda: now)
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
            for _ in range(2):  # The kernel drops further attempts to connect.
                other = waiting.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(full.getsockname())
            connections.watch(UID, {"r0": "{}:{}".format(*full.getsockname())})
            await until_async(lambda: view().wanted_at == 1000.0, "an attempt", view)
            now += 0.9
            assert view().silent_for(now) == pytest.approx(0.9)
            assert stream_ends() == before, "the first attempt goes on"
            connections.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("one_at_a_time")
def test_a_stream_that_waits_its_turn_to_be_opened_again_is_silent_for_no_longer(tmp_path: Path) -> None:
    open_streams: list[asyncio.StreamWriter] = []

    async def reports(asked: protocol.Message, writer: asyncio.StreamWriter) -> None:
        open_streams.append(writer)
        await forever(asked, writer)

    now = 1000.0

    async def scenario() -> None:
        nonlocal now
        connections = AgentConnections(lambda uid, at_once: None, clock=lambda: now, wall=lambda: now)
        await connections.open(UID, CREATED, MASTER)
        view = lambda: connections.views(UID)["r0"]  # noqa: E731
        async with agent(reports, tmp_path) as address:
            connections.watch(UID, {"r0": address})
            await until_async(lambda: view().connected, "a stream", view)
            async with a_handshake_without_end(connections):
                abort(open_streams[0])
                await until_async(lambda: view().queued_at is not None, "a stream that waits its turn", view)
                now += 0.9  # Longer gaps count as a stall.
                assert view().silent_for(now) == 0.0
            await until_async(lambda: view().connected, "the stream again", view)
            connections.close()

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
            now, offset = now + 0.9, offset + change
            observed_view = view()
            assert observed_view.lost_at is not None
            assert observed_view.ready_at is not None
            assert now + offset - observed_view.lost_at == pytest.approx(now - 1000.0)
            assert now + offset - observed_view.ready_at == pytest.approx(now - 1000.0)
        connections.close()

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


def test_who_is_in_no_round_hears_where_the_coordinator_is_once_there_is_one(tmp_path: Path) -> None:
    asked: list[protocol.Message] = []
    leading = dataclasses.replace(report(state="running"), replica="r1", coordinator=True)

    async def leads(_: protocol.Message, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.encode(leading))
        await asyncio.sleep(LIMIT)

    async def scenario() -> str:
        connections = AgentConnections(Heard())
        await connections.open(UID, CREATED, MASTER)
        async with agent(remembered(asked), tmp_path) as address, agent(leads, tmp_path) as coordinator:
            for wanted in ({"r0": address}, {"r0": address, "r1": coordinator}, {"r0": address, "r1": coordinator}):
                connections.watch(UID, wanted)
                for name in wanted:
                    await until_async(
                        lambda name=name: connections.views(UID)[name].connected, "a stream", lambda: asked
                    )
            connections.watch(UID, wanted)
            assert connections.views(UID)["r0"].connected, "nobody is asked again for the same"
        connections.close()
        return coordinator

    coordinator = asyncio.run(scenario())
    assert [watch.coordinator for watch in asked if isinstance(watch, protocol.Watch)] == ["", coordinator]
