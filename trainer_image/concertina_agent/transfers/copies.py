"""Transfers of shards between agents.

A round is a period in which a fixed set of replicas trains. The members of a round form a ring. Each committed shard is
copied to the next member in this ring. Shards that starting workers need are fetched from any member.
"""

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
"""Number of parts of a shard to transfer in parallel, if neither agent transfers another shard.

On two cores, four streams are not faster than two, and use more processor time.
"""
LEAST = 1 << 24
"""Minimum size of a part in bytes. The transfer of a smaller part would be short compared with the TLS handshake."""

GONE = (OSError, asyncio.TimeoutError, ProtocolError, Damaged)


class Peers:
    """Transfers of shards with other agents of the present round.

    A round is a period in which a fixed set of replicas trains.
    """

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
        """Prepare transfers with the agents of other replicas. No round has begun yet.

        Set `even` if each rank saves an equally large part of the state, in the order of the ranks.
        """
        self._even = even
        self._uid, self._replica, self._connector, self._snapshots = uid, replica, connector, snapshots
        self._emit, self._tasks = emit, tasks
        self._assign: Optional[p.Assign] = None
        self._copying: list[asyncio.Task[None]] = []
        self._fetching: dict[tuple[p.SnapshotId, int], asyncio.Lock] = {}
        self._fetched: dict[tuple[p.SnapshotId, int], Path] = {}
        """Paths of shards in this replica's volume that have been verified in this round."""
        self._pulling = self._sending = 0
        """Number of shards that this agent is receiving, and number of parts that it is sending."""

    def begin(self, effect: e.StartRound) -> None:
        self._assign = assign = effect.assign
        self._snapshots.news.notify()
        for number in expected(assign, self._replica, self._even):
            self._copying.append(self._tasks.start("fetch shard", self._fetch_early(assign.restore.id, number)))

    def stop(self, effect: e.KillWorkers) -> None:
        """Stop all transfers, because the round is over."""
        self._assign = None
        for task in self._copying:
            task.cancel()
        self._copying.clear()
        self._fetching.clear()
        self._fetched.clear()
        self._snapshots.forget_fetched()
        self._snapshots.news.notify()

    # --- copies of the previous member's shards ---------------------------------------------------------------------

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
                    shard = await self._receive_shard(wire, address, slot, header)
                    after = shard.id.step
                    self._emit(e.CopyHeld(shard.id, number))
                    await wire.send(p.Copied(shard.id, number))
            await asyncio.sleep(RETRY_SECONDS)

    # --- shards that this agent's workers need ----------------------------------------------------------------------

    async def fetch(self, id: p.SnapshotId, number: int) -> Path:
        """Return the path of a local file with a verified shard, after fetching it from another replica if necessary.

        Raises Damaged if no other replica can provide the shard. The error's text is a sentence.
        """
        async with self._fetching.setdefault((id, number), asyncio.Lock()):
            if (id, number) not in self._fetched:
                self._fetched[id, number] = await self._fetch(id, number)
            return self._fetched[id, number]

    async def _fetch_early(self, id: Optional[p.SnapshotId], number: int) -> None:
        """Verify a local shard, or fetch the shard from another replica, before a worker requests it."""
        with contextlib.suppress(OSError, Damaged):  # when a worker requests the shard, it gets the error
            if id is not None:
                await self.fetch(id, number)

    async def _fetch(self, id: p.SnapshotId, number: int) -> Path:
        for shard in (self._snapshots.find(id, number), self._snapshots.fetched(id, number)):
            if shard is not None:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, shard.verify)
                    return shard.path
                except (OSError, Damaged):
                    self._snapshots.discard(shard)
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
        self._snapshots.free(self._snapshots.fetched_path(id, number))  # free the space of parts that were received
        raise Damaged(_nowhere(id, number, reasons))

    async def header(self, id: p.SnapshotId, number: int) -> str:
        """Return the safetensors header of a shard.

        Raises:
            Damaged: If no other replica can provide the header. The error's text is a sentence.
        """
        reasons = []
        shard = self._snapshots.find(id, number)
        if shard is not None:
            try:
                return shard.tensors_header()
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
            pull = p.Pull(self._uid, number, id, parts=_parallel_streams(self._pulling))
            async with self._open_pull(address, pull) as (wire, header):
                return (await self._receive_shard(wire, address, self._snapshots.fetched_path(id, number), header)).path
        finally:
            self._pulling -= 1

    @contextlib.asynccontextmanager
    async def _open_pull(self, address: str, pull: p.Pull) -> AsyncIterator[tuple[ShardWire, p.ShardHeader]]:
        """Request a shard from another agent, and yield the connection and the ShardHeader in the answer.

        The request is `pull`. Within the `with` block, the caller receives the shard's bytes on the connection.

        Raises:
            Damaged: If the other agent refuses, or sends another shard.
        """
        with contextlib.closing(await self._connector.for_shards(address)) as wire:
            await wire.send(pull)
            header = _header(await within(STALL_SECONDS, wire.receive()), pull.parts)
            if (header.id, header.shard) != (pull.id, pull.shard):
                sent = f"shard {header.shard} of round {header.id.round}, step {header.id.step}"
                raise Damaged(f"{sent} was sent instead")
            yield wire, header
            with contextlib.suppress(OSError):
                await wire.send(p.Copied(header.id, header.shard))

    async def _receive_shard(self, wire: ShardWire, address: str, path: Path, header: p.ShardHeader) -> Shard:
        """Receive a shard and commit it.

        If the shard is damaged, the sending agent is informed before the error is raised. The sending agent then
        deletes its file, so that the next round does not use it.

        Raises:
            Damaged: If the bytes differ from those that the header announced.
        """
        remove_sidecar(path)
        other_parts = (self._receive_part(address, path, header, part) for part in range(1, header.parts))
        try:
            return commit(path, header, await together(wire.take(path, header, 0), *other_parts))
        except Damaged as error:
            with contextlib.suppress(*GONE):
                await wire.send(p.Refused(str(error), 0, ""))
                await within(STALL_SECONDS, wire.receive())
            raise

    async def _receive_part(self, address: str, path: Path, header: p.ShardHeader, part: int) -> int:
        """Receive one part of a shard, and return the part's crc32.

        Raises:
            Damaged: If the part belongs to another shard.
        """
        pull = p.Pull(self._uid, header.shard, header.id, part=part, parts=header.parts)
        async with self._open_pull(address, pull) as (wire, part_header):
            if part_header != header:
                raise Damaged(f"part {part} was sent of another shard")
            return await wire.take(path, header, part)

    def _holders(self, number: int) -> list[p.Member]:
        return nearest(self._assign, self._replica, number) if self._assign else []

    # --- requests of peers ------------------------------------------------------------------------------------------

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
            return await wire.send(p.Refused(f"part {message.part} of {message.parts} does not exist", 0, ""))
        self._sending += 1
        try:
            await self._send_shard(
                wire, shard, message.part, message.parts if message.part else self._parts(message, shard)
            )
        finally:
            self._sending -= 1
        return None

    def _parts(self, message: p.Pull, shard: Shard) -> int:
        """Return the number of parts into which a shard is divided for a transfer.

        An agent that sends many shards at once does not divide them, because these transfers already use all its cores.
        """
        return max(1, min(message.parts, shard.size // LEAST, _parallel_streams(self._sending)))

    async def _stream(self, message: p.Pull, wire: ShardWire) -> None:
        """Send a shard to another agent each time a worker has committed that shard in this round.

        Stop when the receiver is gone or the round ends.
        """
        news, after = self._snapshots.news, message.after_step
        while not wire.gone():
            count = news.count
            if self._assign is not None and self._assign.round > message.round:
                return await wire.send(p.Refused(f"round {message.round} is over", self._assign.round, ""))
            shard = self._snapshots.newest(message.round, message.shard, after)
            if shard is None:
                await news.wait(count, p.BEAT_SECONDS)
                continue
            answer = await self._send_shard(wire, shard, 0, 1)
            if answer is None:
                return None
            after = answer.id.step
            self._emit(e.PeerCopied(answer.id, answer.shard))
        return None

    async def _send_shard(self, wire: ShardWire, shard: Shard, part: int, parts: int) -> Optional[p.Copied]:
        """Send a part of a shard, and return the receiver's confirmation, or None if the receiver sends none.

        The receiver verifies the shard, and confirms it. Without a confirmation, this agent verifies its own file too.
        If that file is damaged, this agent deletes it, so that no agent requests the file again (decision "The receiver
        checks a shard").

        Raises:
            ConnectionError: If the shard is damaged.
        """
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


def _parallel_streams(transfers: int) -> int:
    """Return the number of streams for one transfer, if `transfers` transfers run at once."""
    return max(1, STREAMS // transfers)


def _header(answer: Optional[p.Message], parts: int = 1) -> p.ShardHeader:
    """Return an answer that is a ShardHeader with at most `parts` parts.

    Raises:
        Damaged: If the answer is anything else.
    """
    if isinstance(answer, p.ShardHeader) and 1 <= answer.parts <= parts:
        return answer
    if isinstance(answer, p.ShardHeader):
        raise Damaged(f"{answer.parts} parts were sent instead of {parts}")
    raise Damaged(answer.reason if isinstance(answer, p.Refused) else "the connection was closed")


def nearest(assign: p.Assign, replica: str, number: int) -> list[p.Member]:
    """Return the other members that hold a shard, sorted by distance.

    Members on the same node come first, then those in the same zone, then all others.
    """
    own_member = next((member for member in assign.members if member.replica == replica), None)
    holders = assign.restore.holders.get(str(number), ())
    holding_members = [
        member
        for member in (*assign.members, *assign.outside)
        if member.replica in holders and member is not own_member
    ]
    return (
        sorted(holding_members, key=lambda member: (member.node != own_member.node, member.zone != own_member.zone))
        if own_member
        else holding_members
    )


def expected(assign: p.Assign, replica: str, even: bool) -> range:
    """Return the numbers of the shards that workers of this replica will probably request.

    The agent fetches these shards from other replicas before the workers have built their model, so this is a guess. If
    the number of ranks equals the number of saved shards, each worker needs the shard of its own rank. If the number of
    ranks has changed and `even` is set (each shard is an equal part of the state), the workers need the shards that
    overlap their parts. Otherwise, the result is empty.
    """
    world, id = sum(member.workers for member in assign.members), assign.restore.id
    own_member = next((member for member in assign.members if member.replica == replica), None)
    if assign.restore.source != p.RestoreSource.MEMORY or id is None or own_member is None:
        return range(0)
    if not even and id.shards != world:
        return range(0)
    begin, end = own_member.first_rank, own_member.first_rank + own_member.workers
    return range(begin * id.shards // world, -(-end * id.shards // world))


def _not_here(id: p.SnapshotId, number: int) -> p.Refused:
    return p.Refused(f"shard {number} of round {id.round}, step {id.step} is not stored here", 0, "")


def _nowhere(id: p.SnapshotId, number: int, reasons: list[str]) -> str:
    tried = "; ".join(reasons) or "no member has it"
    return f"Shard {number} of the snapshot of round {id.round}, step {id.step} can't be fetched: {tried}."
