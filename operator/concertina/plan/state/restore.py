"""Where a round's state comes from: the newest id of which every shard is held somewhere; ids are never mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus, unix_seconds
from concertina.plan.state.rollback import is_undone, undone
from concertina_protocol import Durable, Prepared, Restore, RestoreSource, SnapshotId, Storage, StorageHealth


@dataclass(frozen=True)
class Unknown:
    """Storage has to be asked first; `error` is what it says, if it is not just slow."""

    error: str


@dataclass(frozen=True)
class RestoreCandidate:
    """A state that a round could go on from."""

    restore: Restore
    rank: tuple[bool, int, int]
    """Not void, round and step: the highest is the best. A void checkpoint is gone on from where there is nothing else:
    it is a state of the same samples."""
    unusable: Unknown | None = None
    """Why it can't be gone on from though it is the best."""


def choose(
    replies: Mapping[str, Prepared], storages: Iterable[Storage | None], status: JobStatus, uid: str, spec: JobSpec
) -> Restore | Unknown:
    """The best candidate, with what was undone or is damaged, and the samples that are left out."""
    best = max(candidates(replies, storages, status, uid, spec), key=lambda candidate: candidate.rank)
    if best.unusable:
        return best.unusable
    skipped = tuple((some.begin, some.end) for some in status.skipped)
    *before, last = undone(status) or (None,)
    damaged = tuple(bad.uri for bad in status.damaged_checkpoints or ())
    return replace(best.restore, skipped=skipped, undone=last, undone_before=tuple(before), damaged=damaged)


def candidates(
    replies: Mapping[str, Prepared], storages: Iterable[Storage | None], status: JobStatus, uid: str, spec: JobSpec
) -> list[RestoreCandidate]:
    """In memory, in storage, and the beginning; of equals the first is nearer. `replies` of the members to be;
    `storages` as the agents last saw durable storage."""
    found = []
    whole = complete(replies, status)
    if whole:
        id = max(whole, key=lambda id: (id.round, id.step, id.layout))
        in_memory = Restore(source=RestoreSource.MEMORY, step=id.step, id=id, holders=whole[id])
        found.append(RestoreCandidate(in_memory, (True, id.round, id.step)))
    unread = None
    if uses_storage(spec):
        told = [storage for storage in storages if storage is not None]
        looks = [storage for storage in told if not _outdated(storage, status)]
        ready = [storage for storage in looks if storage.state == StorageHealth.READY]
        if not ready:
            unread = Unknown(next((storage.message for storage in looks if storage.state == StorageHealth.ERROR), ""))
        if durable := newest((storage.latest for storage in ready), status, uid):
            rank = (not _is_void(durable, status, uid), *_age(durable, uid))
            found.append(RestoreCandidate(_stored(durable, status, uid), rank, unread))
        if told and not looks:  # the last round may have written one that nobody here has seen
            found.append(
                RestoreCandidate(Restore(source=RestoreSource.STORAGE), (True, status.world.round, -1), unread)
            )
    return [*found, RestoreCandidate(Restore(source=RestoreSource.FRESH), (False, -1, -1), unread)]


def _stored(durable: Durable, status: JobStatus, uid: str) -> Restore:
    """Return the restore from a stored checkpoint, or from one before it where it was undone, or is damaged."""
    back = status.rollback if durable.uid == uid and is_undone(durable.round, durable.step, status) else None
    damaged = next((bad for bad in status.damaged_checkpoints or () if bad.uri == durable.uri), None)
    step = back.step if back else damaged.previous_step if damaged else durable.step
    return Restore(source=RestoreSource.STORAGE, step=step, durable=durable)


def _outdated(storage: Storage, status: JobStatus) -> bool:
    """Whether the agent has not looked since the last round, and was not of it: that may have gone far beyond what it
    knows, with nobody left to tell (decision "Who was not of the last round looks at storage again"). It has been asked
    to look again (Prepare does)."""
    return storage.state == StorageHealth.READY and storage.round is not None and storage.round < status.world.round


def uses_storage(spec: JobSpec) -> bool:
    """Whether the job's own agents look after durable checkpoints."""
    return spec.checkpoint is not None and spec.bundled


def complete(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Ids of which these replicas hold every shard, and which are not void; with the holders of each shard."""
    return {id: shards for id, shards in held(replies, status).items() if len(shards) == id.shards}


def held(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Ids of which these replicas hold a shard, and which are not void; with the holders of each shard."""
    found: dict[SnapshotId, dict[str, list[str]]] = {}
    for name, reply in replies.items():
        for some in reply.snapshots:
            shards = found.setdefault(some.id, {})
            for shard in some.shards:
                shards.setdefault(str(shard), []).append(name)
    return {
        id: {shard: tuple(dict.fromkeys(names)) for shard, names in shards.items()}
        for id, shards in found.items()
        if not void(id.round, id.step, status)
    }


def age(restore: Restore, uid: str) -> tuple[int, int]:
    """(round, step) of the state, comparable with a snapshot's: the higher, the newer."""
    if restore.id is not None:
        return restore.id.round, restore.id.step
    if restore.durable is None or restore.voids(restore.durable):
        return -1, -1
    return _age(restore.durable, uid)


def void(round: int, step: int, status: JobStatus) -> bool:
    """Whether a state of a lower round lies beyond the step from which the current one started, or was undone."""
    base = status.world.base
    return (base is not None and round < base.round and step > base.step) or is_undone(round, step, status)


def newest(seen: Iterable[Durable | None], status: JobStatus, uid: str) -> Durable | None:
    """What LATEST names, as far as anyone knows: agents may not have looked for a while, the status remembers too."""
    known = [durable for durable in seen if durable is not None]
    if mark := status.last_checkpoint:
        at = unix_seconds(mark.at)
        known.append(Durable(uid, mark.round, mark.step, mark.uri, complete=mark.complete, at=at))
    return max(known, key=lambda durable: _age(durable, uid), default=None)


def _age(durable: Durable, uid: str) -> tuple[int, int]:
    """(round, step), comparable with a snapshot's. Another job's rounds are not comparable: older than any of ours."""
    return (durable.round if durable.uid == uid else -1, durable.step)


def _is_void(durable: Durable, status: JobStatus, uid: str) -> bool:
    return durable.uid == uid and void(durable.round, durable.step, status)
