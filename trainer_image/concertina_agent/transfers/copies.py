"""Shards between agents: the ring copy of each commit, and what a starting worker needs from its peers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.files.shards import Shard, commit
from concertina_agent.files.snapshot_files import SnapshotFiles
from concertina_agent.net.shard_wire import STALL_SECONDS, ShardWire
from concertina_agent.net.wire import Connector
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.connection import Connection
from concertina_protocol.log import log_event
from concertina_protocol.sidecar import Damaged, remove_sidecar
from concertina_protocol.waiting import together, within

RETRY_SECONDS = 0.1
STREAMS = max(2, min(4, os.cpu_count() or 2))
"""Parts of a shard that are pulled side by side, where its holder gives and its puller takes no other. On two cores
four are no faster than two, and take more of them."""
LEAST = 1 << 24
"""Bytes of a part: fewer are not worth a handshake."""

GONE = (OSError, asyncio.TimeoutError, ProtocolError, Damaged)


class Peers:
    def __init__(
        self,
        uid: str,
        replica: str,
        connector: Connector,
        snapshots: SnapshotFiles,
        emit: Callable[[e.Event], None],
        tasks: TaskGroup,
        even: bool = False,
    ) -> None:
        """`even`: ranks hold even parts of the state, in their order."""
        self._even = even
        self._uid, self._replica, self._connector, self._snapshots = uid, replica, connector, snapshots
        self._emit, self._tasks = emit, tasks
        self._assign: Optional[p.Assign] = None
        self._copying: list[asyncio.Task[None]] = []
        self._fetching: dict[tuple[p.SnapshotId, int], asyncio.Lock] = {}
        self._fetched: dict[tuple[p.SnapshotId, int], Path] = {}
        """Of this round, here and checked."""
        self._pulling = self._giving = 0
        """Shards, and parts of shards, at this moment."""

    def begin(self, effect: e.StartRound) -> None:
        self._assign = assign = effect.assign
        self._snapshots.news.notify()
        for number in expected(assign, self._replica, self._even):
            self._copying.append(self._tasks.start("fetch shard", self._expect(assign.restore.id, number)))

    def stop(self, effect: e.KillWorkers) -> None:
        """The round is over."""
        self._assign = None
        for task in self._copying:
            task.cancel()
        self._copying.clear()
        self._fetching.clear()
        self._fetched.clear()
        self._snapshots.forget_fetched()
        self._snapshots.news.notify()

    # --- copying from the member before us --------------------------------------------------------------------------

    def copy_from(self, effect: e.CopyFrom) -> None:
        for number in effect.shards:
            work = self._copy(effect.round, effect.member.address, number)
            self._copying.append(self._tasks.start("copy shard", work))

    async def _copy(self, round: int, address: str, number: int) -> None:
        after = -1
        while True:
            with contextlib.suppress(*GONE), contextlib.closing(await self._connector.for_shards(address)) as wire:
                await wire.send(p.Pull(self._uid, number, None, round, after))
                while True:
                    header = _header(await wire.receive())
                    slot = self._snapshots.copy_slot(header.id, header.shard)
                    shard = await self._take(wire, address, slot, header)
                    after = shard.id.step
                    self._emit(e.CopyHeld(shard.id, number))
                    await wire.send(p.Copied(shard.id, number))
            await asyncio.sleep(RETRY_SECONDS)

    # --- what a worker of ours needs --------------------------------------------------------------------------------

    async def fetch(self, id: p.SnapshotId, number: int) -> Path:
        """A local file with this shard, checked; pulled from a peer if need be. Raises Damaged with a sentence."""
        async with self._fetching.setdefault((id, number), asyncio.Lock()):
            if (id, number) not in self._fetched:
                self._fetched[id, number] = await self._fetch(id, number)
            return self._fetched[id, number]

    async def _expect(self, id: Optional[p.SnapshotId], number: int) -> None:
        """Check, or pull, what a worker of ours will ask for as soon as it is there."""
        with contextlib.suppress(OSError, Damaged):  # the worker's own request says so
            if id is not None:
                await self.fetch(id, number)

    async def _fetch(self, id: p.SnapshotId, number: int) -> Path:
        for held in (self._snapshots.find(id, number), self._snapshots.fetched(id, number)):
            if held is not None:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, held.verify)
                    return held.path
                except (OSError, Damaged):
                    self._snapshots.discard(held)
        reasons = []
        for member in self._holders(number):
            try:
                path = await self._fetch_from(member.address, id, number)
            except GONE as error:
                reasons.append(f"{member.address}: {error or type(error).__name__}")
            else:
                log_event(
                    "shard_pulled", shard=number, round=id.round, step=id.step, holder=member.replica, node=member.node
                )
                return path
        self._snapshots.free(self._snapshots.fetched_path(id, number))  # the room that its parts took
        raise Damaged(_nowhere(id, number, reasons))

    async def header(self, id: p.SnapshotId, number: int) -> str:
        """The safetensors header of this shard. Raises Damaged with a sentence."""
        reasons = []
        held = self._snapshots.find(id, number)
        if held is not None:
            try:
                return held.tensors_header()
            except (OSError, Damaged) as error:
                reasons.append(str(error))
        for address in (member.address for member in self._holders(number)):
            try:
                answer = await self._connector.ask(address, p.Index(self._uid, id, number))
                if isinstance(answer, p.ShardHeader):
                    return answer.header
                reasons.append(f"{address}: {answer.reason if isinstance(answer, p.Refused) else answer}")
            except GONE as error:
                reasons.append(f"{address}: {error or type(error).__name__}")
        raise Damaged(_nowhere(id, number, reasons))

    async def _fetch_from(self, address: str, id: p.SnapshotId, number: int) -> Path:
        self._pulling += 1
        try:
            pull = p.Pull(self._uid, number, id, parts=_side_by_side(self._pulling))
            async with self._pulled(address, pull) as (wire, header):
                return (await self._take(wire, address, self._snapshots.fetched_path(id, number), header)).path
        finally:
            self._pulling -= 1

    @contextlib.asynccontextmanager
    async def _pulled(self, address: str, pull: p.Pull) -> AsyncIterator[tuple[ShardWire, p.ShardHeader]]:
        """The connection with what answers a Pull, whose bytes are taken in the block."""
        with contextlib.closing(await self._connector.for_shards(address)) as wire:
            await wire.send(pull)
            header = _header(await within(STALL_SECONDS, wire.receive()), pull.parts)
            if (header.id, header.shard) != (pull.id, pull.shard):
                sent = f"shard {header.shard} of round {header.id.round}, step {header.id.step}"
                raise Damaged(f"{sent} was sent instead")
            yield wire, header
            with contextlib.suppress(OSError):
                await wire.send(p.Copied(header.id, header.shard))

    async def _take(self, wire: ShardWire, address: str, path: Path, header: p.ShardHeader) -> Shard:
        """Raises Damaged, after the holder has seen it too: the next round is not to count on that shard."""
        remove_sidecar(path)
        others = (self._take_part(address, path, header, part) for part in range(1, header.parts))
        try:
            return commit(path, header, await together(wire.take(path, header, 0), *others))
        except Damaged as error:
            with contextlib.suppress(*GONE):
                await wire.send(p.Refused(str(error), 0, ""))
                await within(STALL_SECONDS, wire.receive())
            raise

    async def _take_part(self, address: str, path: Path, header: p.ShardHeader, part: int) -> int:
        """Its crc32."""
        pull = p.Pull(self._uid, header.shard, header.id, part=part, parts=header.parts)
        async with self._pulled(address, pull) as (wire, of_part):
            if of_part != header:
                raise Damaged(f"part {part} was sent of another shard")
            return await wire.take(path, header, part)

    def _holders(self, number: int) -> list[p.Member]:
        return nearest(self._assign, self._replica, number) if self._assign else []

    # --- what peers ask of us ---------------------------------------------------------------------------------------

    async def answer_index(self, message: p.Index, wire: Connection) -> None:
        shard = self._snapshots.find(message.id, message.shard)
        if shard is None:
            return await wire.send(_not_here(message.id, message.shard))
        try:
            header = shard.tensors_header()
        except (OSError, Damaged) as error:
            return await wire.send(p.Refused(str(error), 0, ""))
        return await wire.send(dataclasses.replace(shard.header, header=header))

    async def answer_pull(self, message: p.Pull, wire: ShardWire) -> None:
        if message.id is None:
            return await self._stream(message, wire)
        shard = self._snapshots.find(message.id, message.shard)
        if shard is None:
            return await wire.send(_not_here(message.id, message.shard))
        if message.part and not 0 < message.part < message.parts:
            return await wire.send(p.Refused(f"there is no part {message.part} of {message.parts}", 0, ""))
        self._giving += 1
        try:
            await self._give(wire, shard, message.part, message.parts if message.part else self._parts(message, shard))
        finally:
            self._giving -= 1
        return None

    def _parts(self, message: p.Pull, shard: Shard) -> int:
        """Who pulls many at once, or from one that gives many, gets each in one stream: all cores are in use then."""
        return max(1, min(message.parts, shard.size // LEAST, _side_by_side(self._giving)))

    async def _stream(self, message: p.Pull, wire: ShardWire) -> None:
        """Every newest commit of one shard of this round, until the copier leaves or the round ends."""
        news, after = self._snapshots.news, message.after_step
        while not wire.gone():
            count = news.count
            if self._assign is not None and self._assign.round > message.round:
                return await wire.send(p.Refused(f"round {message.round} is over", self._assign.round, ""))
            shard = self._snapshots.newest(message.round, message.shard, after)
            if shard is None:
                await news.wait(count, p.BEAT_SECONDS)
                continue
            answer = await self._give(wire, shard, 0, 1)
            if answer is None:
                return None
            after = answer.id.step
            self._emit(e.PeerCopied(answer.id, answer.shard))
        return None

    async def _give(self, wire: ShardWire, shard: Shard, part: int, parts: int) -> Optional[p.Copied]:
        """The other end checks what it was given; where it does not say that this has arrived, it is checked here:
        nobody is to be sent here again for damaged bytes (decision "Who takes a shard checks it")."""
        try:
            await wire.give(shard, part, parts)
            with contextlib.suppress(OSError, ProtocolError):
                answer = await wire.receive()
                if isinstance(answer, p.Copied):
                    return answer
            await asyncio.get_running_loop().run_in_executor(None, shard.verify)
        except Damaged as error:
            self._snapshots.discard(shard)
            raise ConnectionError(str(error)) from error
        return None


def _side_by_side(transfers: int) -> int:
    """Streams of one of so many transfers at once."""
    return max(1, STREAMS // transfers)


def _header(answer: Optional[p.Message], parts: int = 1) -> p.ShardHeader:
    """Of so many parts at most."""
    if isinstance(answer, p.ShardHeader) and 1 <= answer.parts <= parts:
        return answer
    if isinstance(answer, p.ShardHeader):
        raise Damaged(f"{answer.parts} parts were sent of {parts}")
    raise Damaged(answer.reason if isinstance(answer, p.Refused) else "the connection was closed")


def nearest(assign: p.Assign, replica: str, number: int) -> list[p.Member]:
    """The others that hold a shard: those on the same node first, then those in the same zone, then the rest."""
    me = next((member for member in assign.members if member.replica == replica), None)
    holders = assign.restore.holders.get(str(number), ())
    others = [other for other in (*assign.members, *assign.outside) if other.replica in holders and other is not me]
    return sorted(others, key=lambda other: (other.node != me.node, other.zone != me.zone)) if me else others


def expected(assign: p.Assign, replica: str, even: bool) -> range:
    """Shards that workers of this replica will ask for, as far as that is known before they have built their model:
    where nothing was resized, their own numbers; where parts are even, those that have some of theirs."""
    world, id = sum(member.workers for member in assign.members), assign.restore.id
    mine = next((member for member in assign.members if member.replica == replica), None)
    if assign.restore.source != p.RestoreSource.MEMORY or id is None or mine is None:
        return range(0)
    if not even and id.shards != world:
        return range(0)
    begin, end = mine.first_rank, mine.first_rank + mine.workers
    return range(begin * id.shards // world, -(-end * id.shards // world))


def _not_here(id: p.SnapshotId, number: int) -> p.Refused:
    return p.Refused(f"shard {number} of round {id.round}, step {id.step} is not held here", 0, "")


def _nowhere(id: p.SnapshotId, number: int, reasons: list[str]) -> str:
    tried = "; ".join(reasons) or "no member holds it"
    return f"Shard {number} of the snapshot of round {id.round}, step {id.step} can't be had: {tried}."
