"""Restore of a `State`: find the newest saved state, and read this rank's part of it into the script's objects."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Container, Mapping
from typing import Any

from concertina_protocol import Durable, Restore, RestoreSource, SnapshotId
from concertina_protocol.stderr import write_line
from concertina_protocol.worker_channel import Start
from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.shardfile import Continued, Header, ShardMetadata
from concertina_state.saved import InMemory, SavedState, find
from concertina_state.saving import StepFlags
from trainingjob import _storage, _values
from trainingjob._contents import Contents
from trainingjob._folder import Folder
from trainingjob._objects import RandomNumbers
from trainingjob._refusals import INSTEAD
from trainingjob._save import OwnShard
from trainingjob._session import Session, StartPoint, agree, name_of

STORAGE_SECONDS, STORAGE_PAUSE = 300.0, 5.0
"""Seconds for which to retry reads from durable storage, and seconds to wait after a refused attempt.

Waiting is better than failing at once, because a failed start counts against the job's restarts.
"""
NOTHING_KNOWN = Restore(RestoreSource.FRESH)


@dataclasses.dataclass(frozen=True)
class RestorePoint:
    """Saved state from which this round continues.

    A round is a period in which a fixed set of replicas trains.
    """

    saved: SavedState
    begun_from: str = ""
    """URI of another job's checkpoint, if the run begins with it."""
    continued: Continued | None = None
    """Job, round and step of that checkpoint."""

    @property
    def step(self) -> int:
        """Number of steps that were finished when the state was saved."""
        return self.saved.id.step

    @property
    def place(self) -> RestoreSource:
        """Kind of place where the state is stored: memory or durable storage."""
        return RestoreSource.MEMORY if isinstance(self.saved, InMemory) else RestoreSource.STORAGE

    def start_point(self, metadata: ShardMetadata) -> StartPoint:
        """Return the step and origin of this round, given the metadata of the saved state."""
        origin, continued = metadata.origin, metadata.continued
        if self.begun_from:
            origin, continued = origin.begun_with(self.begun_from), self.continued
        return StartPoint(self.step, metadata.position, origin, continued)


@dataclasses.dataclass(frozen=True)
class Restored:
    """Facts about a restored state that this round's first snapshot needs.

    A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node
    memory.
    """

    values: Mapping[str, Any]
    """This rank's values, by object."""
    layout: str
    """Digest of the arrays that all ranks hold."""
    metadata: ShardMetadata


# --- find -----------------------------------------------------------------------------------------------------------


def find_newest(session: Session, reading: contextlib.ExitStack) -> RestorePoint | None:
    """Return the newest saved state, or None if nothing was saved. All ranks must make this call.

    Args:
        session: World, agent and settings of this process.
        reading: Exit stack. Until it is closed, a checkpoint in storage is not deleted.

    Raises:
        InvalidInput: The checkpoint belongs to another job, or is damaged.
        StorageError: Durable storage could not be read for STORAGE_SECONDS.
    """
    if isinstance(session.agent, Folder):
        newest = session.agent.newest()
        return None if newest is None else RestorePoint(newest)
    start = session.agent.start()
    durable = session.ranks.same(_durable(session, start, reading)) if session.checkpoint.get("uri") else None
    if durable is not None:
        _storage.find_client()
        from concertina_state.checkpoints.reader import StoredCheckpoint

        stored = StoredCheckpoint(durable.uri)
        if durable.uid == start.uid:
            return RestorePoint(stored)
        return RestorePoint(stored, stored.uri, Continued(durable.uid, durable.round, durable.step))
    if start.restore.source == RestoreSource.MEMORY and start.restore.id is not None:
        return RestorePoint(InMemory(start.restore.id, session.agent))
    return None


def _durable(session: Session, start: Start, reading: contextlib.ExitStack) -> Durable | None:
    """Return the checkpoint in storage to continue from, or None if the snapshot in memory is at least as new.

    Only rank 0 calls this function.

    Raises:
        StorageError: Durable storage could not be read for STORAGE_SECONDS.
    """
    if session.world.rank != 0:
        return None
    in_memory = start.restore.id if start.restore.source == RestoreSource.MEMORY else None
    latest = _newer(start, in_memory) if in_memory is not None else None
    if in_memory is not None and latest is None:
        return None  # the agents know LATEST, so storage may be away
    _storage.find_client()
    from concertina_state.checkpoints.reader import opened
    from concertina_state.objects.prefix import StorageError, StoreRefused

    if latest is not None:
        reading.enter_context(opened(latest.uri))
        return latest
    deadline = time.monotonic() + STORAGE_SECONDS
    while True:
        try:
            return newest_in_storage(session.checkpoint, reading, start.restore)
        except StorageError as error:
            if time.monotonic() > deadline:
                raise
            write_line(f"trainingjob: durable storage can't be read and is tried again: {error}")
            time.sleep(STORAGE_PAUSE if isinstance(error, StoreRefused) else 1.0)


def _newer(start: Start, in_memory: SnapshotId) -> Durable | None:
    """Return the newest checkpoint in storage if it belongs to this job and is newer than `in_memory`, otherwise None.

    `in_memory` is the snapshot that the agents have. The newest checkpoint is the one that the object LATEST names.
    """
    latest = start.durable
    if latest is None or latest.uid != start.uid or start.restore.bars(latest, start.uid):
        return None
    return latest if (latest.round, latest.step) > (in_memory.round, in_memory.step) else None


def newest_in_storage(
    checkpoint: Mapping[str, Any], reading: contextlib.ExitStack, restore: Restore = NOTHING_KNOWN
) -> Durable | None:
    """Return the newest checkpoint in the job's own folder, or else the checkpoint that the spec names as the start.

    Args:
        checkpoint: `spec.checkpoint` of the job.
        reading: Exit stack. Until it is closed, the checkpoint is not deleted.
        restore: The operator's message, which lists undone and damaged checkpoints.

    Raises:
        InvalidInput: The folder belongs to another job, or all checkpoints are damaged.
        StorageError: Durable storage can't be read.
    """
    from concertina_state.checkpoints import owner
    from concertina_state.checkpoints.latest import read_latest
    from concertina_state.checkpoints.reader import opened, resolve
    from concertina_state.checkpoints.rollback import none_left, usable
    from concertina_state.objects.prefix import ObjectPrefix

    own_folder = ObjectPrefix(checkpoint["uri"], create=True)
    latest, uid = read_latest(own_folder), os.environ.get("CONCERTINA_UID", "")
    if latest and latest.uid != uid:
        try:
            owner.look(own_folder, owner.this_job(uid), checkpoint.get("takeOver") or "")
        except owner.NotOwner as error:
            raise InvalidInput(str(error)) from error
    latest = latest and usable(latest, uid, restore)
    if latest is None and restore.damaged:
        raise none_left(restore.damaged)
    another = checkpoint.get("resumeFrom")
    uri = latest.uri if latest else resolve(another) if another else ""
    if not uri:
        return None
    place = reading.enter_context(opened(uri)).manifest.place
    return latest or Durable(place.uid, place.round, place.step, uri)


# --- fill -----------------------------------------------------------------------------------------------------------


def values_for(session: Session, source: RestorePoint) -> Mapping[str, Any]:
    """Return the saved values that this rank takes over, keyed by the object's name."""
    shard, rank = _own_shard(session, source)
    return _own_values(shard, rank, source)


def fill(session: Session, contents: Contents, own_shard: OwnShard, source: RestorePoint) -> Restored:
    """Restore all objects of the script from a saved state. All ranks must make this call.

    Raises:
        InvalidInput: The saved state is of other objects, or its arrays have other shapes or dtypes.
        RestoreFailed: The state can't be read.
    """
    world, saved = session.world, source.saved
    shard, rank = _own_shard(session, source)
    values = _own_values(shard, rank, source)
    contents.check_names(values, source.step)
    contents.prepare(values)
    arrays, buffers = contents.arrays(), contents.buffers()
    own_shard.buffers_by_rank = any(f"{rank}.{name}" in shard.header.chunks for name in buffers)
    index = own_shard.new_index(arrays, buffers)
    layout = agree(session, StepFlags(), index).layout
    unchanged = (saved.id.layout, saved.id.shards) == (layout, world.size)
    only_shard = world.rank if unchanged and index.alone else None
    selection = find(saved, only_shard, lambda headers: index.plan(headers, INSTEAD))
    names = {*arrays, *buffers, *(f"{rank}.{name}" for name in buffers)}
    _check_nothing_lost(selection.headers, names, contents.names_without_dicts, rank)
    index.fill(selection.plan, selection.shards)
    if own_shard.buffers_by_rank:
        session.ranks.fill_own(buffers, shard, f"{rank}.")
    if source.place is RestoreSource.STORAGE:
        session.ranks.sums([0.0])  # a barrier: all ranks have read the checkpoint
    contents.load(values)
    return Restored(values, layout, selection.metadata)


def end_restore(session: Session, contents: Contents, source: RestorePoint) -> None:
    """Begin to track the positions of data loaders and the steps of optimizers, from the restored state on.

    If the number of ranks has changed since the save, this is logged.
    """
    rank, saved_size = session.world.rank, source.saved.id.shards
    if rank >= saved_size:
        RandomNumbers().reseed(rank)
    _log_other_size(session, saved_size)
    contents.end_restore()


def _own_shard(session: Session, source: RestorePoint) -> tuple[ShardReader, str]:
    """Return the shard with the values that this rank takes over, and the prefix of their names in the shard.

    A rank takes over the values of the rank with the same number. If there are more ranks than at the save, an
    additional rank takes over the values of another rank.
    """
    rank = session.world.rank % source.saved.id.shards
    return source.saved.open(rank), name_of(rank)


def _own_values(shard: ShardReader, rank: str, source: RestorePoint) -> Mapping[str, Any]:
    """Return the values in a shard that belong to one rank, keyed by the name of the object in the state.

    `rank` is the prefix of the names of the rank's values in the shard.

    Raises:
        InvalidInput: The state was not saved by a `State`.
    """
    stored = shard.header.chunks.get(rank)
    if stored is None:
        raise InvalidInput(f"the saved state of step {source.step} was not saved by trainingjob.State")
    text = bytearray(stored.chunk.size)
    shard.read_into([(stored.begin, memoryview(text))])
    values: Mapping[str, Any] = _values.decode(bytes(text))
    return values


def _check_nothing_lost(
    headers: Mapping[int, Header], names: Container[str], objects: Collection[str], rank: str
) -> None:
    """Check that every saved array also exists in the script's objects. A removed layer's arrays, for example, do not.

    Args:
        headers: Headers of the saved shards, keyed by the shard's number.
        names: Names of the arrays that the script has.
        objects: Names of the objects to check.
        rank: Prefix of the names of this rank's own arrays.

    Raises:
        InvalidInput: An array is missing.
    """
    prefixes = (*(f"{name}." for name in objects), *(f"{rank}.{name}." for name in objects))
    for header in headers.values():
        for name in header.chunks:
            if name.startswith(prefixes) and name not in names:
                array = name.removeprefix(f"{rank}.")
                raise InvalidInput(f"the saved state has {array}, which the script no longer has: {INSTEAD}.")


def _log_other_size(session: Session, saved_size: int) -> None:
    """If the number of ranks has changed, log which ranks' own values are used twice or are not used any more."""
    rank, size = session.world.rank, session.world.size
    own = "own values (buffers, plain values, positions in the data)"
    if rank >= saved_size:
        source = name_of(rank % saved_size)
        text = f"rank {rank} is new, and starts with the {own} of {source}, without the random number state"
    elif rank == 0 and size < saved_size:
        text = f"the {own} of each rank from {name_of(size)} on are left out"
    else:
        return
    write_line(f"trainingjob: the state was saved by {saved_size} ranks: {text}")
