"""Who gets in and what they may say: real TLS, against one real agent."""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import concertina_protocol as p
import concertina_protocol as protocol
from builders.train.replicas import GIVE_UP, UID, Job, running, write_identity
from concertina.agents.authority import Authority
from concertina.agents.calls import CallError, ConnectionIdentity, call
from concertina_agent import main
from concertina_agent.net import server, tls
from concertina_agent.net.wire import Connector

IDLE = ["--", sys.executable, "-c", "import time; time.sleep(600)"]
PREPARE = p.Prepare(UID, 1, "claim-1", ())


def run(body) -> None:
    asyncio.run(body())


async def ask(address: str, context: ssl.SSLContext, message: p.Message, name: str = UID) -> p.Message:
    return await Connector(context, name).ask(address, message, GIVE_UP)


def test_agents_may_not_speak_as_the_operator_nor_the_operator_as_an_agent(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            agent = tls.client_context(folder / "identity")
            for message in (p.Drain(UID, 1, "c", "", False, 1.0), p.Relay(UID, "{}", ())):
                answer = await ask(job[0].address, agent, message)
                assert isinstance(answer, p.Refused)
                assert "agent may not send" in answer.reason
            assert await ask(job[0].address, agent, p.Ping(UID)) == p.Accepted(0, "")
            for message in (p.Ping(UID), p.Join(UID, 1, "c", "a", "b"), p.Pull(UID, 0)):
                answer = await ask(job[0].address, job.identity.context, message)
                assert isinstance(answer, p.Refused)
                assert "operator may not send" in answer.reason
            answer = await ask(job[0].address, agent, p.Ping("another"))
            assert isinstance(answer, p.Refused), "the right certificate and another job's uid"

    run(body)


def test_a_watch_is_answered_beside_its_stream_and_carries_calls_alone(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            wire = await Connector(job.identity.context, UID).connect(job[0].address)
            with contextlib.closing(wire):
                await wire.send(p.Watch(UID, changes=True))
                first = await wire.receive(GIVE_UP)
                assert isinstance(first, p.Report)
                assert first.takes_calls
                await wire.send(PREPARE)
                await wire.send(PREPARE)
                lines = [await wire.receive(GIVE_UP) for _ in range(5)]
                answers = [line for line in lines if isinstance(line, p.Prepared)]
                assert [answer.claim for answer in answers] == ["claim-1", "claim-1"]
                assert any(isinstance(line, (p.Report, p.ReportChange)) for line in lines), "the stream goes on"
                await wire.send(p.Watch(UID))
                while not isinstance(last := await wire.receive(GIVE_UP), p.Refused):
                    assert last is not None
                assert "is not allowed on the connection of a Watch" in last.reason
                with contextlib.suppress(OSError):
                    assert await wire.receive(GIVE_UP) is None

    run(body)


def test_another_jobs_certificates_are_refused_on_both_sides(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            other = Authority(b"k" * 32, "another-job", time.time())
            with pytest.raises(CallError):
                await call(ConnectionIdentity(UID, other.client_context()), job[0].address, PREPARE)
            foreign = write_identity(folder / "foreign", other)
            with pytest.raises((OSError, asyncio.TimeoutError)):  # our side refuses the agent's certificate
                await ask(job[0].address, tls.client_context(foreign), p.Ping("another-job"), "another-job")
            careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
            careless.load_cert_chain(foreign / "tls.crt", foreign / "tls.key")
            with pytest.raises((ssl.SSLError, ConnectionError)):  # and its side ours
                await ask(job[0].address, careless, p.Ping("another-job"))
            nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(job[0].address, nobody, p.Ping(UID))
            assert await job.call(job[0], PREPARE)

    run(body)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a message of this protocol"),
        (b'{"v": 99, "kind": "Ping", "body": {}}\n', "protocol version 99"),
        (b'{"v": 1, "kind": "Ping", "body": {"uid": 7}}\n', "can't be read"),
        (b'{"v": 1, "kind": "Report", "body": []}\n', "can't be read"),
        (b"x" * (protocol.MAX_LINE + (1 << 20)), "exceeds the limit"),
    ],
)
def test_garbage_is_refused_and_hurts_nobody(folder, line, reason):
    async def body():
        async with running(folder, 1, IDLE) as job:
            wire = await Connector(tls.client_context(folder / "identity"), UID).connect(job[0].address)
            wire.writer.write(line)
            answer = await wire.receive(GIVE_UP)
            wire.close()
            assert isinstance(answer, p.Refused)
            assert reason in answer.reason
            await job.prepare(1, job[0])

    run(body)


def test_the_door_for_shards_is_as_narrow(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            agent = Connector(tls.client_context(folder / "identity"), UID)
            operator = Connector(job.identity.context, UID)
            nowhere = p.Pull(UID, 0, p.SnapshotId(1, 5, "digest", 1))
            for connector, message, reason in (
                (agent, nowhere, "is not stored here"),
                (agent, p.Pull("another", 0), "agent may not send Pull"),
                (agent, p.Ping(UID), "agent may not send Ping"),
                (operator, nowhere, "operator may not send Pull"),
            ):
                with contextlib.closing(await connector.for_shards(job[0].address, GIVE_UP)) as wire:
                    await wire.send(message)
                    answer = await asyncio.wait_for(wire.receive(), GIVE_UP)
                    assert isinstance(answer, p.Refused)
                    assert reason in answer.reason
            foreign = write_identity(folder / "foreign", Authority(b"k" * 32, "another-job", time.time()))
            with pytest.raises(OSError, match="certificate verify failed"):
                await Connector(tls.client_context(foreign), "another-job").for_shards(job[0].address, GIVE_UP)
            host, _, port = job[0].address.rpartition(":")
            for said in (b"shard\nplain words\n", b"shards, please\n", b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection((host, int(port)), GIVE_UP) as connection:
                    connection.sendall(said)
                    with contextlib.suppress(ConnectionError):
                        while connection.recv(1 << 16):
                            pass  # TLS may say why it ends
            await job.prepare(1, job[0])

    run(body)


def test_silent_and_half_open_connections_do_not_keep_others_out(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            host, _, port = job[0].address.rpartition(":")
            with contextlib.ExitStack() as open_ones:
                for said in (b"", b"sh", b"shard\n", b"\x16") * 50:
                    connection = open_ones.enter_context(socket.create_connection((host, int(port))))
                    connection.sendall(said)
                wires = [await Connector(tls.client_context(folder / "identity"), UID).connect(job[0].address)]
                await job.prepare(1, job[0])
                for wire in wires:
                    wire.close()

    run(body)


def client_hello() -> bytes:
    """Return the first bytes of a TLS handshake that is not continued."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


OPEN_AT_ONCE = 2 * server.MAX_STRANGERS
"""Connections that a flood holds open at a time: fewer than the 1024 files that a process may open by default."""


def flood(open_ones: contextlib.ExitStack, address: str, count: int) -> None:
    """Open `count` connections that stay strangers, OPEN_AT_ONCE at a time: the agent turns the oldest away."""
    host, _, port = address.rpartition(":")
    saying = itertools.cycle([client_hello(), b"shard\n" + client_hello(), *(b"", b"\x16", b"sh", b"shard\n") * 10])
    strangers: collections.deque[socket.socket] = collections.deque()
    for said, _ in zip(saying, range(count), strict=False):
        if len(strangers) == OPEN_AT_ONCE:
            turned_away(strangers.popleft())
        connection = open_ones.enter_context(socket.create_connection((host, int(port)), GIVE_UP))
        strangers.append(connection)
        with contextlib.suppress(ConnectionError):  # turned away already
            connection.sendall(said)


def turned_away(connection: socket.socket) -> None:
    with connection, contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass  # its side of the handshake


def test_more_strangers_than_there_is_room_for_keep_nobody_out(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            agent = Connector(tls.client_context(folder / "identity"), UID)
            with contextlib.ExitStack() as open_ones:
                wire = open_ones.enter_context(contextlib.closing(await agent.connect(job[0].address, GIVE_UP)))
                wire.writer.write(b'{"v": 1, "kind": ')
                flood(open_ones, job[0].address, server.MAX_CONNECTIONS + 100)
                assert isinstance(await call(job.identity, job[0].address, PREPARE), p.Prepared)
                assert await agent.ask(job[0].address, p.Ping(UID), GIVE_UP) == p.Accepted(1, "claim-1")
                shards = open_ones.enter_context(contextlib.closing(await agent.for_shards(job[0].address, GIVE_UP)))
                await shards.send(p.Pull(UID, 0, p.SnapshotId(1, 5, "digest", 1)))
                assert isinstance(await asyncio.wait_for(shards.receive(), GIVE_UP), p.Refused)
                assert len(os.listdir(f"/proc/{job[0].process.pid}/fd")) < server.MAX_STRANGERS + 100

    run(body)


def test_who_comes_from_another_address_than_the_strangers_is_given_time(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            host, _, port = job[0].address.rpartition(":")
            with contextlib.ExitStack() as open_ones:
                slow = socket.create_connection((host, int(port)), GIVE_UP, source_address=("127.0.0.2", 0))
                open_ones.enter_context(slow)
                flood(open_ones, job[0].address, OPEN_AT_ONCE)
                context = tls.client_context(folder / "identity")
                with context.wrap_socket(slow, server_hostname=f"{UID}.agent") as connection:
                    connection.sendall(p.encode(p.Ping(UID)))
                    assert p.decode(connection.recv(1 << 16)) == p.Accepted(0, "")

    run(body)


def test_a_member_speaks_for_itself_alone(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            prepared = await job.prepare(1, job[0])
            assign = job.assignment(prepared)
            other = p.Member("job-1-0", "its-instance", "127.0.0.1:1", 1, 1)
            assert isinstance(
                await job.call(job[0], dataclasses.replace(assign, members=(*assign.members, other))), p.Accepted
            )
            wire = await Connector(tls.client_context(folder / "identity"), UID).connect(job[0].address, GIVE_UP)
            await wire.send(p.Join(UID, 1, "claim-1", other.replica, other.instance))
            coordinator = assign.members[0]
            lie = p.Failure(coordinator.replica, "InvalidInput", "as somebody else says", permanent=True)
            await wire.send(
                p.MemberState(coordinator.replica, coordinator.instance, 1, "claim-1", "failed", failure=lie)
            )
            heard = []
            while (message := await wire.receive(GIVE_UP)) is not None:
                heard.append(message)
            wire.close()
            assert "job-1-0 (its-instance) may not act for job-0-0" in heard[-1].reason
            report = await job.until(job[0], lambda report: report.failures)
            assert [(failure.replica, failure.reason) for failure in report.failures] == [("job-1-0", "MemberLost")]

    run(body)


def test_a_disk_that_takes_long_keeps_nobody_waiting_but_those_it_is_written_for(folder):
    """The draft is a pipe that nobody reads: a write that hangs, and then fails."""

    async def body():
        async with running(folder, 1, IDLE) as job:
            draft = job[0].folder / "seen.json.new"
            os.mkfifo(draft)
            preparing = asyncio.ensure_future(call(job.identity, job[0].address, PREPARE))
            report = await job.until(job[0], lambda report: report.round == 1, "the loop stands still")
            agent = tls.client_context(folder / "identity")
            assert await ask(job[0].address, agent, p.Ping(UID)) == p.Accepted(1, "claim-1")
            assert report.state == "prepared"
            assert not preparing.done(), "answered before it was on the disk"
            with draft.open("rb"):
                with pytest.raises(CallError):
                    await preparing
                assert job[0].process.wait() == 2

    run(body)


def test_an_agent_may_open_more_than_its_container_was_given_and_its_workers_may_not(folder):
    script = "import resource; print('limits', resource.getrlimit(resource.RLIMIT_NOFILE))"

    async def body():
        job = Job(folder, 1, ["--", sys.executable, "-c", script])
        job[0].program = ["prlimit", "--nofile=256:1000", *job[0].program]
        job[0].start()
        try:
            await job.ready()
            await job.begin(1, job[0])
            await job.until(job[0], lambda report: report.state == "succeeded", "never succeeded")
            assert resource.prlimit(job[0].process.pid, resource.RLIMIT_NOFILE) == (1000, 1000)
            assert "limits (256, 1000)" in job[0].log()
        finally:
            await job.stop()

    run(body)


def test_an_agent_starts_with_a_damaged_memory(folder):
    async def body():
        job = Job(folder, 1, IDLE)
        (job[0].folder / "seen.json").write_bytes(b"")
        job[0].start()
        try:
            await job.ready()
            await job.begin(3, job[0])
        finally:
            await job.stop()

    run(body)


def test_the_zipapp_runs_a_command_with_the_oldest_python_at_hand(folder):
    built = main.install(folder / "volume")
    assert built.stat().st_mode & 0o111
    assert not list((folder / "volume").glob("tmp*"))
    with zipfile.ZipFile(built) as archive:
        assert "concertina_agent/core/machine.py" in archive.namelist()
    again = subprocess.run([sys.executable, built, "install", folder / "copy"], capture_output=True, timeout=60)
    assert again.returncode == 0, again.stderr
    with zipfile.ZipFile(folder / "copy" / "agent.pyz") as copy, zipfile.ZipFile(built) as archive:
        assert sorted(copy.namelist()) == sorted(archive.namelist())

    async def body():
        job = Job(folder, 2, ["--", sys.executable, "-c", "print('done')"])
        for replica in job.replicas.values():
            replica.program = [oldest_python(), str(folder / "copy" / "agent.pyz")]
            replica.start()
        try:
            await job.ready()
            await job.begin(1, job[0], job[1])
            await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
        finally:
            await job.stop()

    run(body)


def oldest_python() -> str:
    """Python 3.9 where it is installed, else ours: the code is linted as 3.9 in any case."""
    found = [*Path("/usr/bin").glob("python3.9"), *Path.home().glob(".pyenv/versions/3.9.*/bin/python3.9")]
    return str(next(iter(found), sys.executable))


def test_an_agent_tells_a_person_in_its_container_what_it_tells_the_operator(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            replica = job[0]

            def asked(**environment: str) -> subprocess.CompletedProcess:
                return subprocess.run(
                    [*replica.program, "report"],
                    env=replica.environment | environment, capture_output=True, timeout=GIVE_UP, check=False,
                )  # fmt: skip

            done = await asyncio.to_thread(asked)
            assert (done.returncode, done.stderr) == (0, b"")
            report = p.decode(done.stdout)
            assert isinstance(report, p.Report)
            assert (report.replica, report.state) == (replica.name, p.State.IDLE)
            done = await asyncio.to_thread(asked, CONCERTINA_PORT="1")
            assert (done.returncode, done.stdout) == (1, b"")
            assert b"the agent does not answer" in done.stderr

    run(body)
