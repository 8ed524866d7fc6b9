"""Choice of the state from which a round starts, and records of the states that rollbacks made invalid.

A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node memory.
A round starts from the newest snapshot whose shards are all available on replicas. Shards of two snapshots are never
mixed. A rollback is a new round that starts from an older state (decision "A rollback is a new round from an older
state"). All states after that older state are then void, which means that no round may start from them. Samples that an
earlier round skipped remain skipped.
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
    """Result of `choose` while the state to start from depends on a response of storage.

    `error` is the error message of storage. It is empty if storage is only slow.
    """

    error: str


@dataclass(frozen=True)
class RestoreCandidate:
    """A saved training state from which the next round could start.

    A round is a period in which a fixed set of replicas trains.
    """

    restore: Restore
    rank: tuple[bool, int, int]
    """Sort key: whether the state is valid, then its round, then its step. The candidate with the highest key is used.

    A void checkpoint is used only if there is no other candidate. Even such a checkpoint is a state of the same run.
    """
    unusable: Unknown | None = None
    """Reason why the candidate, even as the best candidate, can't be used; None if it can be used."""


def choose(
    replies: Mapping[str, Prepared], storages: Iterable[Storage | None], status: JobStatus, uid: str, spec: JobSpec
) -> Restore | Unknown:
    """Return the state from which the round starts; `Unknown` while that depends on an answer of storage.

    The result also lists the states that rollbacks made invalid, the damaged checkpoints, and the samples to skip.
    """
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
    """Return the possible states: the newest one in memory, the newest one in storage, and the beginning of the run.

    If two candidates are the same state, the one that loads faster comes first.

    Args:
        replies: Answers of the future members.
        storages: Last state of durable storage that each agent reported.
        status: Status of the job.
        uid: Uid of the job.
        spec: Spec of the job.
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
    """Return the instruction to restore from a checkpoint in storage.

    If a rollback made that checkpoint invalid, or if it is damaged, the instruction names the step of an earlier
    checkpoint.
    """
    back = status.rollback if durable.uid == uid and is_undone(durable.round, durable.step, status) else None
    damaged = next((bad for bad in status.damaged_checkpoints or () if bad.uri == durable.uri), None)
    step = back.step if back else damaged.previous_step if damaged else durable.step
    return Restore(source=RestoreSource.STORAGE, step=step, durable=durable)


def _outdated(storage: Storage, status: JobStatus) -> bool:
    """Return whether an agent's information about storage may be outdated, because the agent missed the last round.

    That round may have written later checkpoints, and its members may no longer exist (decision "Agents that missed a
    round read LATEST again"). The Prepare call (which asks a replica to join the next round) has asked the agent to
    read storage again.
    """
    return storage.state == StorageHealth.READY and storage.round is not None and storage.round < status.world.round


def uses_storage(spec: JobSpec) -> bool:
    """Return whether concertina's agents write durable checkpoints of the bundled trainer."""
    return spec.checkpoint is not None and spec.bundled


def complete(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Return the snapshots whose shards are all on the given replicas, keyed by snapshot id.

    Each value maps a shard to the replicas that have it. Void snapshots, from which no round may start, are left out.
    """
    return {id: shards for id, shards in held(replies, status).items() if len(shards) == id.shards}


def held(replies: Mapping[str, Prepared], status: JobStatus) -> dict[SnapshotId, dict[str, tuple[str, ...]]]:
    """Return the snapshots of which at least one shard is on the given replicas, keyed by snapshot id.

    Each value maps a shard to the replicas that have it. Void snapshots, from which no round may start, are left out.
    """
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
    """Return the round and step of a state to restore, as a key to compare states.

    A higher value means a newer state. The value can also be compared with the round and step of a snapshot.
    """
    if restore.id is not None:
        return restore.id.round, restore.id.step
    if restore.durable is None or restore.voids(restore.durable):
        return -1, -1
    return _age(restore.durable, uid)


def void(round: int, step: int, status: JobStatus) -> bool:
    """Return whether no round may start from a state of the given round and step.

    There are two cases. In the first case, a rollback undid the state. In the second case, the state is of an earlier
    round than the current one, and its step is later than the step from which the current round started.
    """
    base = status.world.base
    return (base is not None and round < base.round and step > base.step) or is_undone(round, step, status)


def newest(durables_seen: Iterable[Durable | None], status: JobStatus, uid: str) -> Durable | None:
    """Return the newest checkpoint that the status names or that agents have read from LATEST in storage."""
    durables = [durable for durable in durables_seen if durable is not None]
    if mark := status.last_checkpoint:
        saved_at = unix_seconds(mark.at)
        durables.append(Durable(uid, mark.round, mark.step, mark.uri, complete=mark.complete, at=saved_at))
    return max(durables, key=lambda durable: _age(durable, uid), default=None)


def _age(durable: Durable, uid: str) -> tuple[int, int]:
    """Return the round and step of a checkpoint, comparable with those of a snapshot.

    Round numbers of different jobs can't be compared, so a checkpoint of another job counts as older than any of this
    job.
    """
    return (durable.round if durable.uid == uid else -1, durable.step)


def _is_void(durable: Durable, status: JobStatus, uid: str) -> bool:
    return durable.uid == uid and void(durable.round, durable.step, status)


# --- rollbacks


def last_rollback(ctx: JobContext) -> RollbackMark | None:
    """Return the new value of `status.rollback`: the rollback that this round requests, or the previous value.

    All ranks that request a rollback name the same step. Some ranks may not request one.
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
    """Return the failures of this round in which a worker requests a rollback, each with the requested rollback."""
    failures = ctx.round.report.failures if ctx.round.report else ()
    return [(failure, failure.rollback) for failure in failures if failure.rollback]


def damaged_checkpoints(ctx: JobContext) -> tuple[DamagedCheckpoint, ...] | None:
    """Return the new value of `status.damagedCheckpoints`, with checkpoints that this round reports as damaged.

    If ranks name different steps to return to for the same checkpoint, the lowest step is used.
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
    """Return the states that all rollbacks so far have made void, including a rollback that this round requests."""
    old, back = ctx.status, last_rollback(ctx)
    if back is None or (old.internal.invalidated_checkpoints and back is old.rollback):
        return old.internal.invalidated_checkpoints
    together = joined(undone(old), Undone(back.round, back.step))
    return tuple(UndoneStates(round=state.round, step=state.step) for state in together)


def skipped_samples(ctx: JobContext) -> tuple[SampleRange, ...]:
    """Return the new value of `status.skipped`: the samples that any round has left out of training.

    Entries are never removed.
    """
    report = ctx.round.report
    reported = [report.progress.skipped] if report and report.progress else []
    reported += [back.skipped for _, back in _requested_rollbacks(ctx)]
    if not any(reported):
        return ctx.status.skipped
    together = united(((sample_range.begin, sample_range.end) for sample_range in ctx.status.skipped), *reported)
    # There are never more ranges: workers fail (`anomalies`) before they skip that many.
    return tuple(SampleRange(begin=begin, end=end) for begin, end in together[:MOST_RANGES])


def rollback_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return events for a new rollback, for newly damaged checkpoints and for newly skipped samples."""
    back, events = new.rollback, []
    if new.damaged_checkpoints != old.damaged_checkpoints:
        known_uris = {bad.uri for bad in old.damaged_checkpoints or ()}
        events += [_damage_event(bad) for bad in new.damaged_checkpoints or () if bad.uri not in known_uris]
    elif back is not None and back != old.rollback:
        message = f"round {back.round} is rolled back to step {back.step} or an earlier one: {back.message}"
        events.append(Event("Warning", "RolledBack", message[:1000]))
    if new.skipped != old.skipped:
        left_out = words(tuple((sample_range.begin, sample_range.end) for sample_range in new.skipped))
        events.append(Event("Warning", "SamplesSkipped", f"{left_out} are skipped"[:1000]))
    return tuple(events)


def _damage_event(bad: DamagedCheckpoint) -> Event:
    message = f"training continues from the checkpoint of step {bad.previous_step} or an earlier one"
    return Event("Warning", "CheckpointDamaged", f"{bad.uri} (step {bad.step}) is damaged: {message}"[:1000])


def undone(status: JobStatus) -> tuple[Undone, ...]:
    """Return the states that rollbacks have made void, those of the last rollback at the end.

    The last rollback alone is not enough: if it returned to a later step than an earlier rollback, some states that the
    earlier rollback made void are not among its own (decision "The status lists all rollbacks").
    """
    if status.rollback is None and not status.internal.invalidated_checkpoints:
        return ()
    remembered, back = (
        tuple(Undone(state.round, state.step) for state in status.internal.invalidated_checkpoints),
        status.rollback,
    )
    return joined(remembered, Undone(back.round, back.step)) if back else remembered


def is_undone(round: int, step: int, status: JobStatus) -> bool:
    """Return whether a rollback has made a state of the given round and step invalid."""
    return any(void.covers(round, step) for void in undone(status))
