"""When workers that were killed count as gone, and when others start in their place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

import concertina_protocol as p
from builders.until import until, until_async
from concertina_agent import settings
from concertina_agent.core import events as e
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.transfers.channel import ChannelServer
from concertina_agent.workers import local_workers, output
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.family import ends
from concertina_agent.workers.local_workers import LocalWorker, LocalWorkers
from concertina_agent.workers.workers import Process, StartError
from concertina_protocol import worker_channel as w
from concertina_protocol.worker_channel.agent_end import AgentEnd

SLEEPS = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(1, flush=True)"


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Of two threads."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
        yield child
        child.kill()
        child.wait()


def test_a_process_ends_before_it_is_reaped() -> None:
    with sleeping() as child:
        assert not ends(child.pid)
        child.send_signal(signal.SIGSTOP)
        until(lambda: "T" in state(child.pid), "it is stopped")
        assert not ends(child.pid)
        child.kill()
        until(lambda: ends(child.pid), "its end")
        assert child.returncode is None, "nobody has waited for it"
    assert ends(child.pid), "it is gone"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Watched(Reaper):
    """The test's other children are nobody's business."""

    def strays(self) -> list[int]:
        return []


class Starter:
    """Each worker is a real process that this test reaps when it likes."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.processes: list[Process] = []
        self.stack = contextlib.ExitStack()

    async def until_warm(self) -> None:
        pass

    async def start(self, environment: Mapping[str, str], local_rank: int, prefix: str) -> Process:
        self.children.append(self.stack.enter_context(sleeping()))
        self.processes.append(Process(self.children[-1].pid, output.Tail({})))
        return self.processes[-1]

    async def serve_store(self, listening: socket.socket) -> Process:
        raise NotImplementedError


def play(tmp_path: Path, command: tuple[str, ...], scenario: Callable[[LocalWorkers, Starter, list[e.Event]], object]):
    environment = {
        "CONCERTINA_UID": "uid", "CONCERTINA_REPLICA": "r0", "CONCERTINA_POD_IP": "127.0.0.1",
        "PATH": os.environ["PATH"], "CONCERTINA_VOLUME": str(tmp_path), "CONCERTINA_TRAINER": "{}",
    }  # fmt: skip

    async def played() -> None:
        starter, told = Starter(), list[e.Event]()
        with starter.stack:
            local = LocalWorkers(settings.read(environment, command), Watched(), starter, told.append, TaskGroup())
            await scenario(local, starter, told)

    asyncio.run(played())


def begin(local: LocalWorkers, round: int, store: socket.socket | None = None) -> None:
    member = p.Member("r0", "i", "127.0.0.1:1", 0, 1)
    local.start(p.Assign("uid", round, "claim", (member,), "127.0.0.1:2", p.Restore("Fresh")), 0, store, {})


async def begun(local: LocalWorkers, count: int, starter: Starter) -> None:
    await until_async(lambda: len(starter.processes) == count and bool(local.running()), f"{count} workers")


def test_who_waits_for_a_killed_worker_to_be_reaped_is_its_successor(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        begin(local, 1)
        await begun(local, 1, starter)
        await local.halt()
        assert ends(starter.children[0].pid)
        assert not starter.processes[0].ended.done()
        assert not local.running()
        begin(local, 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(starter.processes) == 1, "another has started beside it"
        starter.processes[0].end(-9)
        await begun(local, 2, starter)
        starter.processes[1].end(0)
        assert told == []

    play(tmp_path, (), scenario)


def test_a_script_is_waited_for_with_all_that_it_has_started(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        begin(local, 1)
        await begun(local, 1, starter)
        halting = asyncio.ensure_future(local.halt())
        await until_async(lambda: ends(starter.children[0].pid), "its end")
        for _ in range(50):
            await asyncio.sleep(0)
        assert not halting.done()
        starter.processes[0].end(-9)
        await halting

    play(tmp_path, ("python", "train.py"), scenario)


def test_one_that_never_goes_fails_a_round_and_keeps_its_replica_out_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "GONE_SECONDS", 0.01)

    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        begin(local, 1)
        await begun(local, 1, starter)
        await local.halt()
        begin(local, 2)
        await until_async(lambda: bool(told), "what has failed")
        (failed,) = told
        assert isinstance(failed, e.StartFailed)
        assert failed.round == 2
        assert "have not ended" in failed.message
        halting = asyncio.ensure_future(local.halt())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not halting.done()
        starter.processes[0].end(-9)
        await halting

    play(tmp_path, (), scenario)


class Channel:
    """The channel of a worker, as the agent uses it."""

    peer_pid = 0

    def __init__(self) -> None:
        self.sent: list[w.Message] = []

    def send(self, message: w.Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


async def staying(local: LocalWorkers, starter: Starter) -> tuple[LocalWorker, Channel]:
    """Return a worker of round 1 that can stay."""
    begin(local, 1)
    await begun(local, 1, starter)
    worker, channel = await local.of(starter.processes[0].pid), Channel()
    assert worker is not None
    local.attach(worker, channel, stays=True)
    return worker, channel


async def between_rounds(local: LocalWorkers, starter: Starter) -> tuple[LocalWorker, Channel]:
    """Return a worker that has left round 1 and waits for the next one."""
    worker, channel = await staying(local, starter)
    local.left(worker, w.Left(1, 0))
    assert await local.halt() == ()
    return worker, channel


async def entering(local: LocalWorkers, starter: Starter) -> tuple[LocalWorker, Channel]:
    """Return a worker that was asked to enter round 2."""
    worker, channel = await between_rounds(local, starter)
    begin(local, 2)
    await until_async(lambda: bool(channel.sent), "its entry")
    return worker, channel


def test_one_that_leaves_in_time_enters_the_next_round(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await staying(local, starter)
        halting = asyncio.ensure_future(local.halt())
        await until_async(lambda: bool(channel.sent), "the request")
        assert channel.sent == [w.Leave(1)]
        assert not halting.done()
        local.left(worker, w.Left(1, 1))
        assert await halting == ()
        assert (told, local.running(), worker.running) == ([], {}, True)
        begin(local, 2)
        await until_async(lambda: len(channel.sent) == 2, "its entry")
        enter = channel.sent[-1]
        assert isinstance(enter, w.Enter)
        assert enter.environment["CONCERTINA_ROUND"] == "2"
        assert len(starter.processes) == 1
        assert local.running() == {0: (starter.processes[0].pid,)}
        local.attach(worker, channel, stays=True)
        local.left(worker, w.Left(1, 1))
        assert told == [], "Left of an old round ends no other"
        local.left(worker, w.Left(2, 1, ("Traceback", "RuntimeError: Connection closed by peer", "")))
        assert [(each.round, each.rank, each.code, each.last_error) for each in told] == [
            (2, 0, 1, "RuntimeError: Connection closed by peer")
        ]

    play(tmp_path, (), scenario)


def test_one_that_enters_gets_a_signal_that_came_before_its_entry(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        await between_rounds(local, starter)
        begin(local, 2)
        local.signal(signal.SIGTERM)
        await until_async(lambda: ends(starter.children[0].pid), "its end")
        starter.processes[0].end(-signal.SIGTERM)

    play(tmp_path, (), scenario)


def test_one_that_stays_enters_before_the_store_is_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        _, channel = await between_rounds(local, starter)

        async def serve_store(listening: socket.socket) -> Process:
            raise StartError(f"{[type(message) for message in channel.sent]}")

        monkeypatch.setattr(starter, "serve_store", serve_store)
        with socket.socket() as store:
            begin(local, 2, store)
            failed = e.StartFailed(2, f"Workers could not be started: {[w.Enter]}")
            await until_async(lambda: told[-1] == failed, "the error of the store", lambda: told)

    play(tmp_path, (), scenario)


def test_one_that_is_late_or_stopped_or_unable_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_workers, "LEAVE_SECONDS", 0.01)

    async def late(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, _ = await staying(local, starter)
        assert await local.halt() == (p.Replaced.LATE,)
        assert ends(worker.process.pid)
        local.left(worker, w.Left(1, 0))
        assert told == [], "too late"

    async def stopped(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await staying(local, starter)
        os.kill(worker.process.pid, signal.SIGSTOP)
        await until_async(lambda: "T" in state(worker.process.pid), "it is stopped")
        assert await local.halt() == (p.Replaced.STOPPED,)
        assert channel.sent == []

    async def unable(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await staying(local, starter)
        worker.stays = False
        assert await local.halt() == (p.Replaced.UNABLE,)
        assert channel.sent == []

    for scenario in (late, stopped, unable):
        play(tmp_path, (), scenario)


def test_one_that_is_stopped_while_it_waits_for_the_next_round_is_replaced(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await between_rounds(local, starter)
        os.kill(worker.process.pid, signal.SIGSTOP)
        await until_async(lambda: "T" in state(worker.process.pid), "it is stopped")
        assert await local.halt() == (p.Replaced.STOPPED,)
        assert ends(worker.process.pid)
        starter.processes[0].end(-9)
        begin(local, 3)
        await begun(local, 2, starter)
        assert channel.sent == []

    play(tmp_path, (), scenario)


def test_one_that_is_stopped_as_it_enters_is_seen(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, _ = await entering(local, starter)
        os.kill(worker.process.pid, signal.SIGSTOP)
        await until_async(lambda: [rank for rank, _ in local.poll().stopped] == [0], "it is stopped")

    play(tmp_path, (), scenario)


def test_one_that_dies_while_it_waits_for_the_next_round_is_followed_by_another(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        await between_rounds(local, starter)
        starter.processes[0].end(-9)
        begin(local, 2)
        await begun(local, 2, starter)
        assert [each.code for each in told] == [0], "its end is told once"
        starter.processes[1].end(0)

    play(tmp_path, (), scenario)


def test_one_that_dies_before_its_next_hello_has_failed_in_the_round_that_it_was_to_enter(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, _ = await entering(local, starter)
        worker.channel_closed.set()
        starter.processes[0].end(-9)
        await until_async(lambda: len(told) == 2, "its end")
        assert [(each.round, each.rank, each.code) for each in told] == [(1, 0, 0), (2, 0, -9)]

    play(tmp_path, (), scenario)


def test_one_that_has_not_said_hello_yet_is_asked_to_leave_too(tmp_path: Path) -> None:
    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await entering(local, starter)
        halting = asyncio.ensure_future(local.halt())
        await until_async(lambda: len(channel.sent) == 2, "the request")
        assert channel.sent[-1] == w.Leave(2)
        local.left(worker, w.Left(2, 1))
        assert await halting == ()
        assert len(told) == 1, "the round was over"
        begin(local, 3)
        await until_async(lambda: len(channel.sent) == 3, "its entry")
        assert len(starter.processes) == 1

    play(tmp_path, (), scenario)


def test_what_a_worker_says_between_left_and_its_next_hello_is_dropped(tmp_path: Path) -> None:
    committed = w.Committed(p.SnapshotId(1, 8, "1 shards", 1), 0, str(tmp_path / "slot-0"))

    async def scenario(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        begin(local, 1)
        await begun(local, 1, starter)
        worker = await local.of(starter.processes[0].pid)
        assert worker is not None
        server = ChannelServer("", local, None, None, mock.Mock(), None, told.append, lambda: None)
        ours, theirs = socket.socketpair()
        with theirs:
            serving = asyncio.ensure_future(server._serve(worker, w.Hello(0, 1, stays=True), AgentEnd(ours)))

            def say(*messages: w.Message) -> None:
                theirs.sendall(b"".join(map(w.encode, messages)))

            say(w.Left(1, 0), committed, w.Beat(0, 8, "training"))
            await until_async(lambda: not worker.in_round, "Left")
            assert await local.halt() == ()
            begin(local, 2)
            await until_async(lambda: not worker.has_left.is_set(), "its entry")
            say(committed, w.Hello(0, 1, stays=True), w.Beat(0, 9, "training"))
            theirs.shutdown(socket.SHUT_WR)
            await serving
            said = [(each.round, type(each.message)) for each in told if isinstance(each, e.WorkerMessage)]
            assert said == [(1, w.Hello), (2, w.Hello), (2, w.Beat)]
            starts = [each for each in map(w.decode, theirs.recv(1 << 16).splitlines()) if isinstance(each, w.Start)]
            assert [start.stays for start in starts] == [True, True]

    play(tmp_path, (), scenario)


def test_a_script_is_asked_to_leave_if_it_stays_and_killed_at_once_if_not(tmp_path: Path) -> None:
    async def stays(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await staying(local, starter)
        steps = worker.steps.path
        halting = asyncio.ensure_future(local.halt())
        await until_async(lambda: channel.sent == [w.Leave(1)], "the request")
        local.left(worker, w.Left(1, 1))
        assert await halting == ()
        begin(local, 2)
        await until_async(lambda: len(channel.sent) == 2, "its entry")
        enter = channel.sent[-1]
        assert isinstance(enter, w.Enter)
        assert enter.environment["CONCERTINA_STEP_FILE"] == worker.steps.path != steps
        assert [type(each.message) for each in told if isinstance(each, e.WorkerMessage)] == [w.Hello]

    async def does_not(local: LocalWorkers, starter: Starter, told: list[e.Event]) -> None:
        worker, channel = await staying(local, starter)
        worker.stays = False
        halting = asyncio.ensure_future(local.halt())
        await until_async(lambda: ends(worker.process.pid), "its end")
        worker.process.end(-9)
        assert await halting == ()
        assert channel.sent == []

    for scenario in (stays, does_not):
        play(tmp_path, ("python", "train.py"), scenario)
