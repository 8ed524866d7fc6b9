"""Shards between agents: real TLS on the loopback, real files; holders that lie, break off or fall silent."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import io
import os
import resource
import socket
import threading
import time
import zlib

import pytest

import concertina_protocol as p
from builders.train.replicas import GIVE_UP, UID, write_identity
from concertina.agents.authority import Authority
from concertina_agent.core import events as e
from concertina_agent.files.shards import commit, fill
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.net import tls
from concertina_agent.net.server import AgentServer
from concertina_agent.net.shard_wire import PREFACE, dial
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.transfers.copies import LEAST, STREAMS, Peers
from concertina_protocol.sidecar import Damaged
from concertina_state import snapshots
from programs.endless import State

ID = p.SnapshotId(1, 5, "digest", 1)
DATA = os.urandom((3 << 20) + 1)
HEADER = p.ShardHeader(ID, 0, len(DATA), zlib.crc32(DATA))
LARGE = os.urandom((2 * LEAST) + 1)
IN_TWO = p.ShardHeader(ID, 0, len(LARGE), zlib.crc32(LARGE), parts=2)
HALF = len(LARGE) // 2


class Holder:
    """The agents' own server and its end of the copies, with one shard of round 1 on its volume."""

    def __init__(self, volume, identity, data=DATA):
        self.snapshots, self.volume = SnapshotFiles(volume), volume
        self.heard: list[e.Event] = []
        self.peers = Peers(
            UID, "holder", Connector(tls.client_context(identity), UID), self.snapshots, self.heard.append, TaskGroup()
        )
        self.watch = self.join = self.answer = self.relay = self.learn = None
        self.index = self.peers.answer_index
        self.asked: list[tuple[int, int]] = []
        """Which parts, of how many."""
        self.server = AgentServer(UID, tls.server_context(identity), self, TaskGroup())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.server.start("127.0.0.1", int(self.address.rpartition(":")[2]))
        self.path = self.snapshots.round_folder(1) / "shard-0" / "slot-0"
        header = p.ShardHeader(ID, 0, len(data), zlib.crc32(data))
        commit(self.path, header, [fill(self.path, header, io.BytesIO(data).readinto)])
        self.snapshots.committed(self.path)

    async def pull(self, message, wire):
        self.asked.append((message.part, message.parts))
        self.at_once = wire._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await self.peers.answer_pull(message, wire)


IN_MEMORY = p.Restore("Memory", 5, ID, {"0": ("holder-0",)})
"""What each rank pulls of itself as it begins."""

WAYS = {
    "cut off": (p.encode(HEADER) + DATA[:-1], "shard 0 was cut off"),
    "changed": (p.encode(HEADER) + DATA[:-1] + bytes([DATA[-1] ^ 1]), "shard 0 of step 5 did not arrive completely"),
    "splits": (p.encode(dataclasses.replace(HEADER, parts=9)) + DATA, f"9 parts were sent instead of {STREAMS}"),
    "another": (p.encode(dataclasses.replace(HEADER, shard=1)) + DATA, "shard 1 of round 1, step 5 was sent instead"),
    "refuses": (p.encode(p.Refused("shard 0 is not stored here", 0, "")), "shard 0 is not stored here"),
    "hangs up": (b"", "the connection was closed"),
    "babbles": (b"how do you do\n", "not a message of this protocol"),
}
"""What a holder says to a Pull before it hangs up, and what is said of it."""


class Liar(threading.Thread):
    """A holder with the right certificate that says this to a Pull, and that to the next; then it leaves, or waits."""

    def __init__(self, identity, *words: bytes, stays: bool = False):
        super().__init__(daemon=True)
        self._context, self._words, self._stays = tls.server_context(identity), words, stays
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked, self.sent, self.left = threading.Event(), threading.Event(), threading.Event()
        self._to_send = threading.Semaphore(len(words) - 1)
        self.start()

    def run(self):
        with self._listening, concurrent.futures.ThreadPoolExecutor(len(self._words)) as threads:
            for words in self._words:
                threads.submit(self._say, self._listening.accept()[0], words)
        self.left.set()

    def _say(self, connection, words: bytes):
        connection.settimeout(GIVE_UP)
        assert connection.recv(len(PREFACE)) == PREFACE
        with self._context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1 << 16)
            self.asked.set()
            with contextlib.suppress(OSError):  # who has heard enough hangs up
                secure.sendall(words)
                if not self._to_send.acquire(blocking=False):
                    self.sent.set()
                if self._stays:
                    secure.recv(1)


@pytest.fixture
def identity(tmp_path):
    return write_identity(tmp_path / "identity", Authority(b"k" * 32, UID, time.time()))


def assign(*addresses: str, round: int = 2) -> p.Assign:
    members = [p.Member("me", "i", "127.0.0.1:1", 0, 1)]
    members += [p.Member(f"holder-{i}", "i", address, 0, 0) for i, address in enumerate(addresses)]
    holders = {"0": tuple(member.replica for member in members[1:])}
    return p.Assign(UID, round, "claim", tuple(members), "", p.Restore("Durable", 5, ID, holders))


def mine(folder, identity) -> tuple[Peers, SnapshotFiles, list[e.Event]]:
    snapshots, heard = SnapshotFiles(folder / "mine"), []
    peers = Peers(UID, "me", Connector(tls.client_context(identity), UID), snapshots, heard.append, TaskGroup())
    return peers, snapshots, heard


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), GIVE_UP))


@pytest.mark.parametrize("way", WAYS)
def test_what_one_holder_sends_badly_another_one_is_asked_for(tmp_path, identity, way):
    async def body():
        bad, holder = Liar(identity, WAYS[way][0]), Holder(tmp_path / "holder", identity)
        peers, snapshots, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(bad.address, holder.address), 1))
        path = await peers.fetch(ID, 0)
        assert path.read_bytes() == DATA
        assert bad.asked.is_set()
        assert await peers.fetch(ID, 0) == path, "once is enough"
        assert snapshots.scan() == (), "what was fetched is for this round's workers alone"
        await holder.server.close()

    run(body)


def test_a_large_shard_comes_in_parts_over_connections_of_their_own(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity, LARGE)
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        assert (await peers.fetch(ID, 0)).read_bytes() == LARGE
        assert holder.asked == [(0, STREAMS), (1, 2)]
        await holder.server.close()

    run(body)


def test_damage_in_any_part_is_found_and_the_holder_sees_it_too(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity, LARGE)
        holder.path.write_bytes(LARGE[:-1] + bytes([LARGE[-1] ^ 1]))
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        with pytest.raises(Damaged, match="did not arrive completely"):
            await peers.fetch(ID, 0)
        assert holder.asked == [(0, STREAMS), (1, 2)]
        assert holder.snapshots.find(ID, 0) is None
        await holder.server.close()

    run(body)


@pytest.mark.parametrize(
    "second",
    [
        p.encode(IN_TWO) + LARGE[HALF:-1], p.encode(dataclasses.replace(IN_TWO, checksum=1)) + LARGE[HALF:],
        p.encode(p.Refused("not stored here", 0, "")), b"",
    ],
    ids=["cut off", "of another", "refused", "hangs up"],
)  # fmt: skip
def test_where_one_part_is_sent_badly_another_holder_is_asked_for_all(tmp_path, identity, second):
    async def body():
        bad = Liar(identity, p.encode(IN_TWO) + LARGE[:HALF], second)
        holder = Holder(tmp_path / "holder", identity, LARGE)
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(bad.address, holder.address), 1))
        assert (await peers.fetch(ID, 0)).read_bytes() == LARGE
        assert bad.asked.is_set()
        assert holder.asked == [(0, STREAMS), (1, 2)]
        await holder.server.close()

    run(body)


def test_a_holder_that_knows_of_no_parts_sends_all_on_one_connection(tmp_path, identity):
    """An agent of the version before."""

    async def body():
        line = p.encode(dataclasses.replace(IN_TWO, parts=1))
        before = line.replace(b',"parts":1', b"")
        assert before != line
        holder = Liar(identity, before + LARGE)
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        assert (await peers.fetch(ID, 0)).read_bytes() == LARGE

    run(body)


def test_who_asks_for_no_parts_gets_all_on_one_connection(tmp_path, identity):
    """An agent of the version before."""

    async def body():
        holder = Holder(tmp_path / "holder", identity, LARGE)
        connector = Connector(tls.client_context(identity), UID)
        with contextlib.closing(await connector.for_shards(holder.address)) as wire:
            await wire.send(p.Pull(UID, 0, ID))
            header = await wire.receive()
            assert header == dataclasses.replace(IN_TWO, parts=1)
            assert await wire.take(tmp_path / "all", header, 0) == header.checksum
            await wire.send(p.Copied(ID, 0))
        await holder.server.close()

    run(body)


def test_a_holder_that_gives_to_several_gives_each_fewer_parts(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity, LARGE)
        connector = Connector(tls.client_context(identity), UID)
        async with contextlib.AsyncExitStack() as stack:
            parts = []
            for _ in range(3):
                wire = stack.enter_context(contextlib.closing(await connector.for_shards(holder.address)))
                await wire.send(p.Pull(UID, 0, ID, parts=STREAMS))
                parts.append((await wire.receive()).parts)
            assert parts == [2, STREAMS // 2, 1]
            for part in (2, -1):
                wire = stack.enter_context(contextlib.closing(await connector.for_shards(holder.address)))
                await wire.send(p.Pull(UID, 0, ID, part=part, parts=2))
                assert await wire.receive() == p.Refused(f"part {part} of 2 does not exist", 0, "")
        await holder.server.close()

    run(body)


def test_parts_for_which_there_is_no_room_leave_none_of_it_taken(tmp_path, identity):
    """The first part has room."""

    async def body():
        holder = Holder(tmp_path / "holder", identity, LARGE)
        peers, snapshots, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, limits[1]))
        try:
            with pytest.raises(Damaged, match="File too large"):
                await peers.fetch(ID, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not snapshots.fetched_path(ID, 0).exists()
        await holder.server.close()

    run(body)


def test_no_line_waits_until_the_other_end_has_told_of_the_one_before(tmp_path, identity):
    """Which it does after 40 ms, where it has nothing to say."""

    async def body():
        holder = Holder(tmp_path / "holder", identity)
        connector = Connector(tls.client_context(identity), UID)
        with contextlib.closing(await connector.for_shards(holder.address)) as wire:
            assert wire._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await wire.send(p.Pull(UID, 1, ID))
            assert isinstance(await wire.receive(), p.Refused)
        assert holder.at_once
        await holder.server.close()

    run(body)


def test_no_answer_waits_until_the_operator_has_acknowledged_the_report_before(tmp_path, identity):
    watched = asyncio.Event()

    async def body():
        holder = Holder(tmp_path / "holder", identity)

        async def watch(message, wire):
            accepted = wire.writer.get_extra_info("socket")
            holder.at_once = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            watched.set()

        holder.watch = watch
        connector = Connector(tls.client_context(identity), UID)
        with contextlib.closing(await connector.connect(holder.address)) as wire:
            await wire.send(p.Watch(UID))
            await asyncio.wait_for(watched.wait(), GIVE_UP)
        assert holder.at_once
        await holder.server.close()

    run(body)


def test_who_waits_for_a_line_keeps_no_thread_from_who_has_something_to_carry(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity)
        context, name = tls.client_context(identity), f"{UID}.agent"
        with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
            waits, carries = [
                stack.enter_context(contextlib.closing(await dial(holder.address, context, name, thread)))
                for _ in range(2)
            ]
            await waits.send(p.Pull(UID, 0, None, 1, ID.step))  # until there is a newer one
            waiting = asyncio.create_task(waits.receive())
            await asyncio.sleep(0)
            await carries.send(p.Pull(UID, 0, ID))
            assert await carries.receive() == HEADER
            waiting.cancel()
        await holder.server.close()

    run(body)


def test_what_no_member_holds_is_had_from_who_is_none(tmp_path, identity):
    """Of a block that was taken out, or beyond spec.replicas."""

    async def body():
        holder = Holder(tmp_path / "holder", identity)
        peers, _, _ = mine(tmp_path, identity)
        told = assign(holder.address)
        me, other = told.members
        peers.begin(e.StartRound(dataclasses.replace(told, members=(me,), outside=(other,)), 0))
        assert (await peers.fetch(ID, 0)).read_bytes() == DATA
        await holder.server.close()

    run(body)


def test_what_no_holder_has_whole_is_named_with_what_each_of_them_did(tmp_path, identity):
    async def body():
        peers, snapshots, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(*(Liar(identity, words).address for words, _ in WAYS.values())), 1))
        with pytest.raises(Damaged) as found:
            await peers.fetch(ID, 0)
        assert "Shard 0 of the snapshot of round 1, step 5 can't be fetched" in str(found.value)
        for _, sentence in WAYS.values():
            assert sentence in str(found.value)
        assert snapshots.fetched(ID, 0) is None

    run(body)


def test_a_shard_that_names_no_tensors_is_not_read_for_them(tmp_path, identity):
    """Whatever its first bytes say of the length of what follows."""

    async def body():
        holder = Holder(tmp_path / "holder", identity)
        holder.path.write_bytes((len(DATA) - 8).to_bytes(8, "little") + DATA[8:])
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        with pytest.raises(Damaged, match="a safetensors header of 2097152 bytes at most"):
            await peers.header(ID, 0)
        await holder.server.close()

    run(body)


def test_a_holder_whose_shard_is_damaged_sees_it_too_and_offers_it_no_more(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity)
        holder.path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
        peers, _, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(assign(holder.address), 1))
        with pytest.raises(Damaged, match="did not arrive completely"):
            await peers.fetch(ID, 0)
        assert holder.snapshots.find(ID, 0) is None
        with pytest.raises(Damaged, match="is not stored here"):
            await peers.fetch(ID, 0)
        await holder.server.close()

    run(body)


def test_a_drain_keeps_its_snapshot_though_it_takes_the_slot_of_a_running_copy(tmp_path, identity):
    """The peer does not keep up: step 0 is complete there, 1 on its way, 2 committed. A drain waits for none of it."""

    async def body():
        holder = Holder(tmp_path / "holder", identity)
        state = State(4 << 20)  # 32 MiB: more than connections take up
        worker = snapshots.Snapshots(holder.snapshots.round_folder(1) / "shard-0", state)
        taken = []
        for step in range(2):
            taken.append(worker.take(state.at(step)))
            holder.snapshots.committed(taken[-1].path)
        worker.complete = 0
        peers, copies, _ = mine(tmp_path, identity)
        connector = Connector(tls.client_context(identity), UID)
        with contextlib.closing(await connector.for_shards(holder.address)) as slow:
            await slow.send(p.Pull(UID, 0, None, 1, 0))
            header = await slow.receive()
            assert header.id == taken[1].id
            for step in (2, 3):
                taken.append(worker.take(state.at(step)))
                holder.snapshots.committed(taken[-1].path)
            assert taken[3].path == taken[1].path
            with pytest.raises(Damaged, match="did not arrive completely"):
                commit(tmp_path / "slow", header, [await slow.take(tmp_path / "slow", header, 0)])
            with contextlib.suppress(OSError):
                await slow.send(p.Refused("did not arrive completely", 0, ""))
                assert await slow.receive() is None, "the holder has seen it too"
        kept = holder.snapshots.find(taken[3].id, 0)
        assert kept is not None
        kept.verify()
        peers.copy_from(e.CopyFrom(1, p.Member("holder", "i", holder.address, 0, 1), (0,)))
        while e.PeerCopied(taken[3].id, 0) not in holder.heard:
            await asyncio.sleep(0.01)
        copies.find(taken[3].id, 0).verify()
        peers.stop(e.KillWorkers(2))
        await holder.server.close()

    run(body)


def test_each_commit_is_copied_and_told_to_both_ends(tmp_path, identity):
    async def body():
        holder = Holder(tmp_path / "holder", identity)
        peers, snapshots, heard = mine(tmp_path, identity)
        peers.copy_from(e.CopyFrom(1, p.Member("holder", "i", holder.address, 0, 1), (0,)))
        later = p.SnapshotId(1, 6, "digest", 1)
        for id in (ID, later):
            if id is later:
                commit(holder.path, p.ShardHeader(later, 0, len(DATA), zlib.crc32(DATA)), [zlib.crc32(DATA)])
                holder.snapshots.committed(holder.path)
            while e.PeerCopied(id, 0) not in holder.heard:
                await asyncio.sleep(0.01)
            assert heard[-1] == e.CopyHeld(id, 0)
            assert snapshots.find(id, 0).path.read_bytes() == DATA
        peers.stop(e.KillWorkers(2))
        await holder.server.close()

    run(body)


@pytest.mark.parametrize("words", [b"", p.encode(HEADER) + DATA[: len(DATA) // 2]], ids=["before", "in the middle"])
def test_a_round_that_ends_while_a_shard_is_awaited_leaves_no_connection_and_no_shard(tmp_path, identity, words):
    async def body():
        liar = Liar(identity, words, stays=True)
        peers, snapshots, heard = mine(tmp_path, identity)
        peers.copy_from(e.CopyFrom(1, p.Member("liar", "i", liar.address, 0, 1), (0,)))
        while not liar.sent.is_set():
            await asyncio.sleep(0.01)
        peers.stop(e.KillWorkers(2))
        while not liar.left.is_set():  # the connection has gone, and so whoever read from it
            await asyncio.sleep(0.01)
        assert heard == []
        assert snapshots.scan() == ()

    run(body)


def test_a_round_that_ends_while_parts_are_awaited_leaves_no_connection_and_no_shard(tmp_path, identity):
    async def body():
        liar = Liar(identity, p.encode(IN_TWO) + LARGE[: HALF // 2], p.encode(IN_TWO) + LARGE[HALF:-9], stays=True)
        peers, snapshots, _ = mine(tmp_path, identity)
        peers.begin(e.StartRound(dataclasses.replace(assign(liar.address), restore=IN_MEMORY), 1))
        while not liar.sent.is_set():
            await asyncio.sleep(0.01)
        peers.stop(e.KillWorkers(2))
        while not liar.left.is_set():
            await asyncio.sleep(0.01)
        assert snapshots.fetched(ID, 0) is None

    run(body)
