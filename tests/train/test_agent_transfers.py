"""Shards on their way between agents: what is cut off, cut short or changed is had from the next holder, or named."""

import asyncio
import contextlib
import time
import zlib

import pytest
from replicas import UID, write_identity

from concertina.control.authority import Authority
from concertina_agent import protocol as p
from concertina_agent import tls
from concertina_agent.copies import Peers
from concertina_agent.snapshots import Damaged, Snapshots
from concertina_agent.wire import Dialer, Wire

ID = p.SnapshotId(1, 5, "layout", 7)
DATA = bytes(range(256)) * 4096
HEADER = p.ShardHeader(ID, 3, len(DATA), zlib.crc32(DATA))


def gives(data: bytes):
    """A holder that announces the shard, sends this and hangs up."""

    async def answer(wire: Wire) -> None:
        wire.write(HEADER)
        wire.writer.write(data)
        await wire.drain()

    return answer


async def refuses(wire: Wire) -> None:
    await wire.send(p.Refused("shard 3 is not held here", 0, ""))


async def hangs_up(wire: Wire) -> None: ...


WAYS = {
    "cut off": (gives(DATA[:-1]), "shard 3 broke off"),
    "changed": (gives(DATA[:-1] + b"\0"), "shard 3 of step 5 did not arrive whole"),
    "nothing": (gives(b""), "shard 3 broke off"),
    "refused": (refuses, "shard 3 is not held here"),
    "hung up": (hangs_up, "the connection was closed"),
}


@contextlib.asynccontextmanager
async def holder(identity, answer):
    """A peer behind real TLS; its address, and how often it was asked."""
    asked = []

    async def serve(reader, writer):
        wire = Wire(reader, writer)
        asked.append(await wire.receive())
        with contextlib.suppress(OSError):
            await answer(wire)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.server_context(identity), limit=p.MAX_LINE)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def pull(folder, *answers):
    """What a replica has of shard 3, from holders that answer so, one after the other; and how often each was asked."""
    identity = write_identity(folder / "identity", Authority(b"k" * 32, UID, time.time()))

    async def body():
        async with contextlib.AsyncExitStack() as stack:
            found = [await stack.enter_async_context(holder(identity, answer)) for answer in answers]
            members = [p.Member(f"r{i}", "i", address, i, 1) for i, (address, _) in enumerate(found)]
            restore = p.Restore("Memory", 5, ID, {"3": tuple(member.replica for member in members)})
            me = p.Member("me", "i", "me:1", len(members), 1)
            snapshots = Snapshots(folder / "volume")
            peers = Peers(UID, Dialer(tls.client_context(identity), UID), snapshots, lambda event: None)
            peers.begin(p.Assign(UID, 2, "c", (*members, me), "store", restore), "me")
            try:
                return (await peers.fetch(ID, 3)).read_bytes(), [len(asked) for _, asked in found]
            finally:
                assert snapshots.scan() == (), "what was fetched is for this round's workers alone"

    return asyncio.run(body())


@pytest.mark.parametrize("way", WAYS)
def test_what_one_holder_sends_badly_another_one_is_asked_for(folder, way):
    assert pull(folder, WAYS[way][0], gives(DATA), gives(DATA)) == (DATA, [1, 1, 0])


def test_what_no_holder_has_whole_is_named_with_what_each_of_them_did(folder):
    with pytest.raises(Damaged) as found:
        pull(folder, *(answer for answer, _ in WAYS.values()))
    assert "Shard 3 of the snapshot of round 1, step 5 can't be had" in str(found.value)
    for _, sentence in WAYS.values():
        assert sentence in str(found.value)
