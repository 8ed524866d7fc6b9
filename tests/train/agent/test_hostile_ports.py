"""Test the ports of an agent and its worker channel against hostile clients, with real processes and real TLS.

Meanwhile, the agent still serves its operator and its workers. Afterwards it has no more open files than before.
"""

import asyncio
import contextlib
import datetime
import functools
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator

import pytest

import concertina_protocol as p
from builders.train.replicas import GIVE_UP, MASTER_KEY, UID, Job, Replica, running, write_identity
from builders.until import until_async
from concertina.agents import authority
from concertina.agents.authority import Authority
from concertina_agent.net import tls
from concertina_agent.net.wire import Connector

REPORTS = """
import time, trainingjob
for step in range(10**9):
    trainingjob.report(step=step + 1, loss=1.0)
    time.sleep(0.05)
"""
COMMAND = ["--", sys.executable, "-c", REPORTS]


def files(replica: Replica) -> int:
    assert replica.process is not None
    return len(os.listdir(f"/proc/{replica.process.pid}/fd"))


def step(report: p.Report | None) -> int:
    return report.progress.step if report and report.progress else 0


async def serves(job: Job, count: int = 3) -> None:
    """Its operator hears of a step that its worker has yet to make, and an agent's ping is answered; some times."""
    for _ in range(count):
        told = step(job[0].report)
        await job.until(job[0], lambda report, told=told: step(report) > told, "no news of its worker")
        agent = Connector(tls.client_context(job[0].folder.parent / "identity"), UID)
        assert await agent.ask(job[0].address, p.Ping(UID), GIVE_UP) == p.Accepted(1, "claim-1")


@contextlib.asynccontextmanager
async def training(folder, program: list[str] | None = None) -> AsyncIterator[Job]:
    """Run a job whose worker reports.

    Afterwards the job must not have failed, and must have closed all files that it opened for hostile clients.
    """
    job = Job(folder, 1, COMMAND)
    job[0].program = [*(program or []), *job[0].program]
    job[0].start()
    try:
        await job.ready()
        await job.begin(1, job[0])
        await job.until(job[0], lambda report: step(report) > 0, "no step")
        before = files(job[0])
        yield job
        await serves(job)
        await until_async(lambda: files(job[0]) <= before, "descriptors given back", lambda: (before, files(job[0])))
        assert job[0].report is not None
        assert (job[0].report.state, job[0].report.failures) == (p.State.RUNNING, ())
        ends = [event for event in job[0].events() if event["event"] in ("task_failed", "illegal_transition")]
        assert ends == []
    finally:
        await job.stop()


def dialled(job: Job, stack: contextlib.ExitStack) -> socket.socket:
    host, _, port = job[0].address.rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), GIVE_UP))


def plain(job: Job, stack: contextlib.ExitStack, context: ssl.SSLContext) -> ssl.SSLSocket:
    return stack.enter_context(context.wrap_socket(dialled(job, stack), server_hostname=f"{UID}.agent"))


async def half_open(job, stack, agent):
    """Who says some bytes of a handshake, or none, and leaves or stays."""
    for said in (b"", b"\x16", b"\x16\x03\x01\x02", b"shard\n", b"shard\n\x16\x03", b"GET / HTTP/1.1\r\n\r\n", b"\x00"):
        for leaves in (False, True):
            connection = dialled(job, stack)
            with contextlib.suppress(OSError):  # the agent may have hung up by then
                connection.sendall(said)
                if leaves:
                    connection.shutdown(socket.SHUT_WR)
    await serves(job)


async def slow(job, stack, agent):
    """Return a line that is sent byte by byte."""
    wires = [await agent.connect(job[0].address, GIVE_UP) for _ in range(5)]
    for wire in wires:
        stack.callback(wire.close)
    for byte in p.encode(p.Ping(UID))[:40]:
        for wire in wires:
            wire.writer.write(bytes([byte]))
        await asyncio.sleep(0.01)
    await serves(job)


async def lines(job, stack, agent):
    """Pings without a pause, whose answers are not read for long."""
    wire = await agent.connect(job[0].address, GIVE_UP)
    stack.callback(wire.close)
    ping = p.encode(p.Ping(UID)) * 20_000
    wire.writer.write(ping)
    await serves(job)


async def never_reads(job, stack, agent):
    """Watches, and does not take what is said."""
    for _ in range(10):
        wire = plain(job, stack, job.identity.context)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(p.encode(p.Watch(UID)) + p.encode(p.Watch(UID)))
    await serves(job, 10)


async def connections(job, stack, agent):
    for _ in range(600):
        with contextlib.suppress(OSError):
            dialled(job, stack)
    await serves(job)


async def endless(job, stack, agent):
    """Send a line without an end to each port."""
    wire = await agent.connect(job[0].address, GIVE_UP)
    stack.callback(wire.close)
    wire.writer.write(b"x" * (p.MAX_LINE + (1 << 20)))
    assert isinstance(await wire.receive(GIVE_UP), p.Refused)
    shards = stack.enter_context(contextlib.closing(await agent.for_shards(job[0].address, GIVE_UP)))
    with contextlib.suppress(OSError):
        await shards._run(lambda: shards._socket.sendall(b"x" * (p.MAX_LINE + (1 << 20))))
    await serves(job)


async def cut(job, stack, agent):
    """Send requests to each port that break off after any byte."""
    pull = p.encode(p.Pull(UID, 0, p.SnapshotId(1, 5, "digest", 1)))
    for end in range(0, len(pull), 7):
        shards = await agent.for_shards(job[0].address, GIVE_UP)
        await shards._run(functools.partial(shards._socket.sendall, pull[:end]))
        shards.close()
        wire = await agent.connect(job[0].address, GIVE_UP)
        wire.writer.write(pull[:end])
        await wire.drain()
        wire.close()
    await serves(job)


def told(context: ssl.SSLContext, connection: socket.socket) -> None:
    """Send a ping, and return the answer.

    Raises:
        ConnectionError: If the agent closes the connection.
    """
    with context.wrap_socket(connection) as secured:
        secured.sendall(p.encode(p.Ping(UID)))
        if not secured.recv(1):
            raise ConnectionError("closed")


async def strangers(job, stack, agent):
    """Certificates of another job, of our own CA that have run out or are nobody's, and none at all."""
    folder = job[0].folder.parent
    old = time.time() - (authority.VALID_AFTER + datetime.timedelta(days=2)).total_seconds()
    wrong = {
        "another": write_identity(folder / "another", Authority(b"o" * 32, UID, time.time())),
        "expired": write_identity(folder / "expired", Authority(MASTER_KEY, UID, old)),
        "other": write_identity(folder / "other", Authority(MASTER_KEY, "other-job", time.time())),
    }
    for identity in (*wrong.values(), None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if identity is not None:
            context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
        for preface in (b"", b"shard\n"):
            connection = dialled(job, stack)
            connection.sendall(preface)
            with pytest.raises((ssl.SSLError, ConnectionError)):  # as TLS 1.3 has it, at the first read
                told(context, connection)
    await serves(job)


TROUBLES = (half_open, slow, lines, never_reads, connections, endless, cut, strangers)


def test_an_agent_goes_on_and_lets_go(folder):
    """One agent has all kinds of trouble, one after the other."""

    async def body():
        async with training(folder) as job:
            before = files(job[0])
            for trouble in TROUBLES:
                with contextlib.ExitStack() as stack:
                    await trouble(job, stack, Connector(tls.client_context(folder / "identity"), UID))
                await serves(job)
                await until_async(
                    lambda: files(job[0]) <= before,
                    f"descriptors given back after {trouble.__name__}",
                    lambda: (before, files(job[0])),
                )

    asyncio.run(body())


FLOOD = """
import os, socket
channel = socket.socket(socket.AF_UNIX)
channel.connect(os.environ["CONCERTINA_SOCKET"])
line = b'{{"kind":"Beat","body":{{"rank":0,"step":%d,"phase":"training"}}}}\\n'
hello = b'{{"kind":"Hello","body":{{"rank":0,"pid":%d}}}}\\n' % os.getpid()
channel.sendall(hello)
while True:
    channel.sendall({said})
"""
BEATS = "(line % 1) * 2000"


@pytest.mark.parametrize("said", [BEATS, "b'no line at all ' * 4096", "b'[' * 65536", "b'{}\\\\n' * 1000"])
def test_a_script_that_floods_its_channel_keeps_its_agent_from_nothing(folder, said):
    """Beats without a pause; a line without an end, and lines that are none: those end the channel alone."""

    async def body():
        job = Job(folder, 1, ["--", sys.executable, "-c", FLOOD.format(said=said)])
        job[0].start()
        try:
            await job.ready()
            await job.begin(1, job[0])
            await job.until(job[0], lambda report: report.state != p.State.PREPARED, "it never began")
            agent = Connector(tls.client_context(folder / "identity"), UID)
            for _ in range(20):
                answer = await agent.ask(job[0].address, p.Ping(UID), GIVE_UP)
                assert answer == p.Accepted(1, "claim-1")
            prepared = await job.prepare(2, job[0])
            assert prepared[job[0].name].round == 2
        finally:
            await job.stop()

    asyncio.run(body())


ADDRESSES = (
    "",
    "nowhere",
    "a:b",
    ":",
    "127.0.0.1:99999",
    "127.0.0.1:-1",
    "[::1",
    "\ud800:1",
    "x" * 300 + ":1",
    "\x00:1",
)


def test_addresses_that_are_none_reach_nobody_and_hurt_nobody(folder):
    """Of candidates to ping and of members to follow, and of those that a line is to be passed on to."""

    async def body():
        async with running(folder, 1, COMMAND) as job:
            strangers = tuple(p.Candidate(f"job-{index}-0", each) for index, each in enumerate(ADDRESSES, 1))
            me = p.Candidate(job[0].name, job[0].address)
            relay = Connector(job.identity.context, UID)
            line = p.encode(p.Prepare(UID, 2, "claim-2", (me, *strangers))).decode().rstrip("\n")
            wire = await relay.connect(job[0].address, GIVE_UP)
            await wire.send(p.Relay(UID, line, (me, *strangers)))
            answers = [await wire.receive(GIVE_UP) for _ in range(len(ADDRESSES) + 1)]
            wire.close()
            told = {answer.replica: answer for answer in answers}
            prepared = p.decode(told.pop(job[0].name).line.encode())
            assert prepared.reachable == (job[0].name,)
            assert all(answer.error for answer in told.values())
            await job.prepare(3, job[0])

    asyncio.run(body())


def test_an_agent_without_a_file_left_to_open_goes_on_when_there_are_some_again(folder):
    """Its hard limit is as low as its container's; a connection too many is not taken until another one has gone."""

    async def body():
        async with training(folder, ["prlimit", "--nofile=64:64"]) as job:
            assert job[0].process is not None
            assert resource.prlimit(job[0].process.pid, resource.RLIMIT_NOFILE) == (64, 64)
            with contextlib.ExitStack() as stack:
                for _ in range(200):
                    with contextlib.suppress(OSError):
                        dialled(job, stack)
                await until_async(lambda: files(job[0]) >= 60, "no file left", lambda: files(job[0]))
                told = step(job[0].report)
                await job.until(job[0], lambda report: step(report) > told, "no news of its worker")

    asyncio.run(body())
