"""The state that a round starts from, and the states that rollbacks made void.

A round starts from the newest snapshot of which every shard is held somewhere; shards of two snapshots are never mixed.
A rollback is a new round from an older state (decision "A rollback is a new round from an older state"): states beyond
that one are void from then on, and the samples that were skipped stay skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import concertina_protocol as protocol
from concertina.api.internal import UndoneStates
from concertina.api.spec import JobSpec
from concertina.api.status import (
    MOST_DAMAGED,
    DamagedCheckpoint,
    JobStatus,
    RollbackMark,
    SampleRange,
    rfc3339,
    unix_seconds,
)
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina_protocol import (
    Durable,
    Failure,
    Prepared,
    Restore,
    RestoreSource,
    SnapshotId,
    Storage,
    StorageHealth,
    Undone,
)
from concertina_protocol.messages.ranges import MOST_RANGES, united, words
from concertina_protocol.messages.undone import joined


@dataclass(frozen=True)
class Unknown:
    """Result if storage must be asked first; `error` is its error message, if it is not just slow."""

    error: str


@dataclass(frozen=True)
class RestoreCandidate:
    """A state that a round could start from."""

    restore: Restore
    rank: tuple[bool, int, int]
    """Sort key: whether the state is not void, its round and its step; the highest is the best. A void checkpoint is
    used only if there is nothing else: it is a state of the same samples."""
    unusable: Unknown | None = None
    """Reason why the candidate can't be used though it is the best."""


def choose(
    replies: Mapping[str, Prepared], storages: Iterable[Storage | None], status: JobStatus, uid: str, spec: JobSpec
) -> Restore | Unknown:
    """Return the best candidate, with what was undone or is damaged, and the samples to leave out."""
    best = max(candidates(replies, storages, status, uid, spec), key=lambda candidate: candidate.rank)
    if best.unusable:
        return best.unusable
    skipped = tuple((sample_range.begin, sample_range.end) for sample_range in status.skipped)
    *earlier, last = undone(status) or (None,)
    damaged = tuple(bad.uri for bad in status.damaged_checkpoints or ())
    return replace(best.restore, skipped=skipped, undone=last, undone_before=tuple(earlier), damaged=damaged)


def candidates(
    replies: Mapping[str, Prepared], storages: Iterable[Storage | None], status: JobStatus, uid: str, spec: JobSpec
) -> list[RestoreCandidate]:
    """Return the candidates in memory and in storage, and the beginning; of equal ones the first is nearer.

    `replies` are those of the future members, and `storages` the agents' last views of durable storage.
    """
    options = []
    whole = complete(replies, status)
    if whole:
        id = max(whole, key=lambda id: (id.round, id.step, id.layout))
        in_memory = Restore(source=RestoreSource.MEMORY, step=id.step, id=id, holders=whole[id])
        options.append(RestoreCandidate(in_memory, (True, id.round, id.step)))
    unread = None
    if uses_storage(spec):
        reported = [storage for storage in storages if storage is not None]
        looks = [storage for storage in reported if not _outdated(storage, status)]
        ready = [storage for storage in looks if storage.state == StorageHealth.READY]
        if not ready:
            unread = Unknown(next((storage.message for storage in looks if storage.state == StorageHealth.ERROR), ""))
        if durable := newest((storage.latest for storage in ready), status, uid):
            rank = (not _is_void(durable, status, uid), *_age(durable, uid))
            options.append(RestoreCandidate(_stored(durable, status, uid), rank, unread))
        if reported and not looks:  # the last round may have written a checkpoint that no agent here has seen
            options.append(
                RestoreCandidate(Restore(source=RestoreSource.STORAGE), (True, status.world.round, -1), unread)
            )
    return [*options, RestoreCandidate(Restore(source=RestoreSource.FRESH), (False, -1, -1), unread)]


def _stored(durable: Durable, status: JobStatus, uid: str) -> Restore:
    """Return the restore from a stored checkpoint, or from an earlier one if it was undone or is damaged."""
    back = status.rollback if durable.uid == uid and is_undone(durable.round, durable.step, status) else None
    damaged = next((bad for bad in status.damaged_checkpoints or () if bad.uri == durable.uri), None)
    step = back.step if back else damaged.previous_step if damaged else durable.step
    return Restore(source=RestoreSource.STORAGE, step=step, durable=durable)


def _outdated(storage: Storage, status: JobStatus) -> bool:
    """Return whether an agent was not in the last round and has not looked at storage since.

    That round may have gone far beyond what the agent knows, with nobody left to report it (decision "Agents that
    missed a round read LATEST again"). A Prepare has asked the agent to look again.
    """
    return storage.state == StorageHealth.READY and storage.round is not None and storage.round < status.world.round


def uses_storage(spec: JobSpec) -> bool:
    """Return whether the job's own agents write durable checkpoints."""
    return spec.checkpoint is not None and spec.bundled


def complete(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Return the snapshots, except void ones, of which these replicas hold every shard, with each shard's holders."""
    return {id: shards for id, shards in held(replies, status).items() if len(shards) == id.shards}


def held(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Return the snapshots that are not void and of which these replicas hold a shard, with each shard's holders."""
    holders: dict[SnapshotId, dict[str, list[str]]] = {}
    for name, reply in replies.items():
        for snapshot in reply.snapshots:
            shards = holders.setdefault(snapshot.id, {})
            for shard in snapshot.shards:
                shards.setdefault(str(shard), []).append(name)
    return {
        id: {shard: tuple(dict.fromkeys(names)) for shard, names in shards.items()}
        for id, shards in holders.items()
        if not void(id.round, id.step, status)
    }


def age(restore: Restore, uid: str) -> tuple[int, int]:
    """Return (round, step) of the state, comparable with a snapshot's: the higher, the newer."""
    if restore.id is not None:
        return restore.id.round, restore.id.step
    if restore.durable is None or restore.voids(restore.durable):
        return -1, -1
    return _age(restore.durable, uid)


def void(round: int, step: int, status: JobStatus) -> bool:
    """Return whether a state of a lower round lies beyond the step that the current one started from, or was undone."""
    base = status.world.base
    return (base is not None and round < base.round and step > base.step) or is_undone(round, step, status)


def newest(durables_seen: Iterable[Durable | None], status: JobStatus, uid: str) -> Durable | None:
    """Return the checkpoint that LATEST names, as far as known.

    Agents may not have looked at storage for a while, and the status has a record too.
    """
    durables = [durable for durable in durables_seen if durable is not None]
    if mark := status.last_checkpoint:
        saved_at = unix_seconds(mark.at)
        durables.append(Durable(uid, mark.round, mark.step, mark.uri, complete=mark.complete, at=saved_at))
    return max(durables, key=lambda durable: _age(durable, uid), default=None)


def _age(durable: Durable, uid: str) -> tuple[int, int]:
    """Return (round, step), comparable with a snapshot's.

    Rounds of another job are not comparable: its checkpoint counts as older than any of this job's.
    """
    return (durable.round if durable.uid == uid else -1, durable.step)


def _is_void(durable: Durable, status: JobStatus, uid: str) -> bool:
    return durable.uid == uid and void(durable.round, durable.step, status)


# --- rollbacks


def last_rollback(ctx: JobContext) -> RollbackMark | None:
    """Return status.rollback: the last rollback, or the one that the report of this round requests.

    All ranks that request a rollback name the same step; some may request none.
    """
    old = ctx.status.rollback
    failures = [failure for failure, back in _requested_rollbacks(ctx) if back.undoes(ctx.observed.job.uid)]
    if not failures or (old and old.round >= ctx.world.round):
        return old
    first = next((failure for failure in failures if not failure.secondary), failures[0])
    step = max(0, min(failure.rollback.step for failure in failures if failure.rollback))
    return RollbackMark(
        round=ctx.world.round,
        step=step,
        reason=first.reason,
        message=first.message[:1000],
        at=rfc3339(round(ctx.now, 3)),
    )


def _requested_rollbacks(ctx: JobContext) -> list[tuple[Failure, protocol.Rollback]]:
    """Return the failures of this round that request a rollback, each with its request."""
    failures = ctx.round.report.failures if ctx.round.report else ()
    return [(failure, failure.rollback) for failure in failures if failure.rollback]


def damaged_checkpoints(ctx: JobContext) -> tuple[DamagedCheckpoint, ...] | None:
    """Return status.damagedCheckpoints: the known ones, and those that the report of this round finds damaged.

    If ranks name several steps to return to for one checkpoint, the lowest one counts.
    """
    old = ctx.status.damaged_checkpoints
    known_uris = {bad.uri for bad in old or ()}
    new: dict[str, DamagedCheckpoint] = {}
    for _, back in sorted(_requested_rollbacks(ctx), key=lambda request: request[1].step, reverse=True):
        if (bad := back.damaged) is not None and bad.uri not in known_uris:
            new[bad.uri] = DamagedCheckpoint(
                uri=bad.uri, step=bad.step, previous_step=max(0, back.step), at=rfc3339(round(ctx.now, 3))
            )
    return (*(old or ()), *new.values())[-MOST_DAMAGED:] if new else old


def undone_states(ctx: JobContext) -> tuple[UndoneStates, ...]:
    """Return the states that all rollbacks made void, including the requested rollback."""
    old, back = ctx.status, last_rollback(ctx)
    if back is None or (old.internal.invalidated_checkpoints and back is old.rollback):
        return old.internal.invalidated_checkpoints
    together = joined(undone(old), Undone(back.round, back.step))
    return tuple(UndoneStates(round=state.round, step=state.step) for state in together)


def skipped_samples(ctx: JobContext) -> tuple[SampleRange, ...]:
    """Return status.skipped: the samples that any round has skipped. It only grows."""
    report = ctx.round.report
    reported = [report.progress.skipped] if report and report.progress else []
    reported += [back.skipped for _, back in _requested_rollbacks(ctx)]
    if not any(reported):
        return ctx.status.skipped
    together = united(((sample_range.begin, sample_range.end) for sample_range in ctx.status.skipped), *reported)
    # There are never more: workers end with an error (`anomalies`) before they skip that many.
    return tuple(SampleRange(begin=begin, end=end) for begin, end in together[:MOST_RANGES])


def rollback_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return the events for a rollback, for damaged checkpoints and for samples that are skipped from now on."""
    back, events = new.rollback, []
    if new.damaged_checkpoints != old.damaged_checkpoints:
        known_uris = {bad.uri for bad in old.damaged_checkpoints or ()}
        events += [_damage_event(bad) for bad in new.damaged_checkpoints or () if bad.uri not in known_uris]
    elif back is not None and back != old.rollback:
        message = f"round {back.round} is rolled back to step {back.step} or before: {back.message}"
        events.append(Event("Warning", "RolledBack", message[:1000]))
    if new.skipped != old.skipped:
        left_out = words(tuple((sample_range.begin, sample_range.end) for sample_range in new.skipped))
        events.append(Event("Warning", "SamplesSkipped", f"{left_out} are left out of the run"[:1000]))
    return tuple(events)


def _damage_event(bad: DamagedCheckpoint) -> Event:
    message = f"training continues from the checkpoint of step {bad.previous_step} or before"
    return Event("Warning", "CheckpointDamaged", f"{bad.uri} (step {bad.step}) is damaged: {message}"[:1000])


def undone(status: JobStatus) -> tuple[Undone, ...]:
    """Return what rollbacks have made void, with the last rollback at the end.

    Of two rollbacks the later one is not enough: if it returned to a later step, it does not cover what the earlier one
    undid (decision "All rollbacks are remembered").
    """
    if status.rollback is None and not status.internal.invalidated_checkpoints:
        return ()
    remembered, back = (
        tuple(Undone(state.round, state.step) for state in status.internal.invalidated_checkpoints),
        status.rollback,
    )
    return joined(remembered, Undone(back.round, back.step)) if back else remembered


def is_undone(round: int, step: int, status: JobStatus) -> bool:
    """Return whether a state of this job was trained beyond a step that the world returned to."""
    return any(void.covers(round, step) for void in undone(status))
