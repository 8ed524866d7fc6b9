"""Who gets in and what they may say: real TLS, against one real agent."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from replicas import GIVE_UP, UID, Job, running, write_identity

from concertina.control.authority import Authority
from concertina.control.calls import CallError, Identity, call
from concertina_agent import main, protocol, tls
from concertina_agent import protocol as p
from concertina_agent.wire import Dialer

IDLE = ["--", sys.executable, "-c", "import time; time.sleep(600)"]
PREPARE = p.Prepare(UID, 1, "claim-1", ())


def run(body) -> None:
    asyncio.run(body())


async def ask(address: str, context: ssl.SSLContext, message: p.Message, name: str = UID) -> p.Message:
    return await Dialer(context, name).ask(address, message, GIVE_UP)


def test_agents_may_not_speak_as_the_operator_nor_the_operator_as_an_agent(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            agent = tls.client_context(folder / "identity")
            for message in (PREPARE, p.Assign(UID, 1, "c", (), "", p.Restore("Fresh")), p.Watch(UID)):
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


def test_another_jobs_certificates_are_refused_on_both_sides(folder):
    async def body():
        async with running(folder, 1, IDLE) as job:
            other = Authority(b"k" * 32, "another-job", time.time())
            with pytest.raises(CallError):
                await call(Identity(UID, other.client_context()), job[0].address, PREPARE)
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
        (b"x" * (protocol.MAX_LINE + (1 << 20)), "over the limit"),
    ],
)
def test_garbage_is_refused_and_hurts_nobody(folder, line, reason):
    async def body():
        async with running(folder, 1, IDLE) as job:
            wire = await Dialer(tls.client_context(folder / "identity"), UID).connect(job[0].address)
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
            agent = Dialer(tls.client_context(folder / "identity"), UID)
            operator = Dialer(job.identity.context, UID)
            nowhere = p.Pull(UID, 0, p.SnapshotId(1, 5, "digest", 1))
            for dialer, message, reason in (
                (agent, nowhere, "is not held here"),
                (agent, p.Pull("another", 0), "agent may not send Pull"),
                (agent, p.Ping(UID), "agent may not send Ping"),
                (operator, nowhere, "operator may not send Pull"),
            ):
                with contextlib.closing(await dialer.for_shards(job[0].address, GIVE_UP)) as wire:
                    await wire.send(message)
                    answer = await asyncio.wait_for(wire.receive(), GIVE_UP)
                    assert isinstance(answer, p.Refused)
                    assert reason in answer.reason
            foreign = write_identity(folder / "foreign", Authority(b"k" * 32, "another-job", time.time()))
            with pytest.raises(OSError, match="certificate verify failed"):
                await Dialer(tls.client_context(foreign), "another-job").for_shards(job[0].address, GIVE_UP)
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
                wires = [await Dialer(tls.client_context(folder / "identity"), UID).connect(job[0].address)]
                await job.prepare(1, job[0])
                for wire in wires:
                    wire.close()

    run(body)


def test_the_zipapp_runs_a_command_with_the_oldest_python_at_hand(folder):
    built = main.install(folder / "volume")
    assert built.stat().st_mode & 0o111
    assert not list((folder / "volume").glob("tmp*"))
    with zipfile.ZipFile(built) as archive:
        assert "concertina_agent/rounds.py" in archive.namelist()
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
