"""What the status tells of progress, saved state and where the time went."""

from __future__ import annotations

import itertools
import math

import concertina_protocol as protocol
from concertina.api.status import (
    CheckpointEvery,
    CheckpointMark,
    ConditionType,
    EvaluationMark,
    Goodput,
    JobProgress,
    RoundWaits,
    ShareMark,
    SnapshotMark,
    rfc3339,
    unix_seconds,
)
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.state import rollback

MOST_SHARES = 16
BUCKETS = {
    Phase.WAITING: "waiting_seconds",
    Phase.STARTING: "startup_seconds",
    Phase.TRAINING: "productive_seconds",
    Phase.DRAINING: "recovery_seconds",
    Phase.RECOVERING: "recovery_seconds",
    Phase.SUSPENDING: "recovery_seconds",
    Phase.STALLED: "stalled_seconds",
}
"""Where the time spent in a phase goes; in other phases the clock stands."""


def progress(ctx: JobContext) -> JobProgress | None:
    """From rank 0's last word; what the status had where there is none."""
    told = ctx.round.report.progress if ctx.round.report else None
    if told is None or told.step < 0 or not told.at:
        return ctx.status.progress
    steps = told.steps
    left = max(0, steps - told.step) if steps else 0  # a script of one's own may go on beyond what it had planned
    return JobProgress(
        step=told.step,
        steps=steps,
        percent=round(100 * min(1.0, told.step / steps), 2) if steps else None,
        eta_seconds=round(left * told.step_seconds, 1) if steps and told.step_seconds else None,
        loss=round(told.loss, 6) if math.isfinite(told.loss) else None,
        tokens_per_second=round(told.tokens_per_second, 1) or None,  # a script of one's own may not know
        mfu=None if told.mfu is None else round(told.mfu, 4) or None,
        evaluation=_evaluation(ctx, told),
        at=rfc3339(round(told.at, 3)),
    )


def _evaluation(ctx: JobContext, told: protocol.Progress) -> EvaluationMark | None:
    """The last one, of an earlier round where this one had none yet; not one of steps that were undone."""
    old = ctx.status.progress.evaluation if ctx.status.progress else None
    if told.evaluated is not None:
        loss = round(told.evaluated.loss, 6) if math.isfinite(told.evaluated.loss) else None
        return EvaluationMark(step=max(0, told.evaluated.step), loss=loss)
    return old if old is not None and old.step <= told.step else None


def shares(ctx: JobContext) -> tuple[ShareMark, ...]:
    """status.shares, the least first. While the lead says nothing it stays as it was."""
    if ctx.round.report is None:
        return ctx.status.shares if ctx.round.committed else ()
    told = ctx.round.report.progress.shares if ctx.round.report.progress else ()
    if len(told) != ctx.world.workers or min(told, default=-1) < 0 or not sum(told):
        return ()
    ranks, even = iter(told), sum(told) / len(told)
    found = []
    for member in ctx.world.members:
        sequences = sum(itertools.islice(ranks, member.workers))
        found.append((round(sequences / (even * member.workers), 3), sequences, member.replica))
    return tuple(
        ShareMark(replica=replica, node=ctx.node_of(replica), sequences=sequences, factor=factor)
        for factor, sequences, replica in sorted(found, key=lambda share: share[0])[:MOST_SHARES]
    )


def interval(ctx: JobContext) -> CheckpointEvery | None:
    told = ctx.round.report.progress.interval if ctx.round.report and ctx.round.report.progress else None
    if told is None:
        return ctx.status.checkpoint_interval
    return CheckpointEvery(
        seconds=round(told.seconds or 0.0),
        suggested_seconds=round(told.suggested),
        save_seconds=round(told.save_seconds, 3),
        failure_seconds=round(told.failure_seconds),
    )


def replayed(ctx: JobContext) -> int:
    """Steps that a command of one's own trains again, as far as it reports them: known once, with the first word of a
    round, since where it goes on from is its own affair."""
    told, old = ctx.round.report.progress if ctx.round.report else None, ctx.status
    if ctx.spec.bundled or told is None or ctx.round.report is None:
        return 0
    if told.restored_step is None or old.progress is None:
        return 0
    return (
        max(0, old.progress.step - told.restored_step)
        if old.internal.round_waits.round != ctx.round.report.round
        else 0
    )


def last_snapshot(ctx: JobContext) -> SnapshotMark | None:
    told = ctx.round.report.progress if ctx.round.report else None
    old = ctx.status.last_snapshot
    if told is None or told.snapshot_step is None or (old and old.step == told.snapshot_step):
        return old
    return SnapshotMark(step=told.snapshot_step, at=rfc3339(round(told.at, 3)))


def last_checkpoint(ctx: JobContext) -> CheckpointMark | None:
    """The newest that any connected agent has seen under LATEST, and that is this job's own."""
    old, uid = ctx.status.last_checkpoint, ctx.observed.job.uid
    if old and rollback.is_undone(old.round, old.step, ctx.status):
        old = None
    best: protocol.Durable | None = None
    for view in ctx.observed.agents.values():
        storage = view.report.storage if view.report else None
        durable = storage.latest if storage and storage.state == protocol.StorageHealth.READY else None
        if durable is None or durable.uid != uid or rollback.is_undone(durable.round, durable.step, ctx.status):
            continue
        if best is None or (durable.round, durable.step) > (best.round, best.step):
            best = durable
    if best is None or (old and (old.round, old.step) >= (best.round, best.step)):
        return old
    at = rfc3339(round(ctx.now if best.at is None else best.at, 3))
    return CheckpointMark(step=best.step, round=best.round, complete=best.complete, uri=best.uri, at=at)


def goodput(ctx: JobContext, decision: Decision) -> Goodput:
    """The time since the last count goes to the phase that the job was in, from a failure on to recovery."""
    old = ctx.status.goodput
    if ctx.status.start_time is None:
        return old
    begin = unix_seconds(old.at) if old.at else unix_seconds(ctx.status.start_time)
    elapsed = max(0.0, ctx.now - begin)
    ready = ctx.status.condition(ConditionType.READY)
    phase = Phase(ready.reason) if ready and ready.reason in Phase._value2member_map_ else Phase.WAITING
    spent = {name: getattr(old, name) for name in SECONDS}
    late = min(elapsed, max(0.0, ctx.now - _failed_at(ctx))) if phase is Phase.TRAINING else 0.0
    if bucket := BUCKETS.get(phase):
        spent[bucket] += elapsed - late
        spent["recovery_seconds"] += late
    _count_waits(ctx, spent)
    _replayed(ctx, decision, spent)
    total = sum(spent.values())
    return Goodput.model_validate(
        {
            "percent": round(100 * spent["productive_seconds"] / total, 2) if total else 0.0,
            "at": rfc3339(round(ctx.now, 3)),
            **{name: round(value, 3) for name, value in spent.items()},
        }
    )


SECONDS = (
    "productive_seconds",
    "startup_seconds",
    "recovery_seconds",
    "checkpoint_seconds",
    "stalled_seconds",
    "waiting_seconds",
)


def _failed_at(ctx: JobContext) -> float:
    """When what broke the round happened; the future where nothing did."""
    failures = ctx.round.report.failures if ctx.round.report else ()
    return min((failure.at for failure in failures if failure.at is not None), default=ctx.now)


def round_waits(ctx: JobContext) -> RoundWaits:
    """What the workers of this round say they waited for."""
    told, old = ctx.round.report.progress if ctx.round.report else None, ctx.status.internal.round_waits
    if ctx.status.start_time is None or told is None or ctx.round.report is None:
        return old
    return RoundWaits(
        round=ctx.round.report.round,
        checkpoint_seconds=round(told.checkpoint_seconds, 3),
        stalled_seconds=round(told.stalled_seconds, 3),
    )


def _count_waits(ctx: JobContext, spent: dict[str, float]) -> None:
    """Moves what is new of them from productive to their own buckets."""
    old, new = ctx.status.internal.round_waits, round_waits(ctx)
    for bucket in ("checkpoint_seconds", "stalled_seconds"):
        before = getattr(old, bucket) if old.round == new.round else 0.0
        moved = min(max(0.0, getattr(new, bucket) - before), spent["productive_seconds"])
        spent["productive_seconds"] -= moved
        spent[bucket] += moved


def _replayed(ctx: JobContext, decision: Decision, spent: dict[str, float]) -> None:
    """Steps that will be trained again were not productive."""
    told = ctx.status.progress
    if not decision.replayed or told is None or not told.eta_seconds or not told.steps or told.steps <= told.step:
        return
    step_seconds = told.eta_seconds / (told.steps - told.step)
    moved = min(decision.replayed * step_seconds, spent["productive_seconds"])
    spent["productive_seconds"] -= moved
    spent["recovery_seconds"] += moved


def seconds_left(ctx: JobContext) -> float:
    """Until a status write may be made that brings nothing but numbers and sentences."""
    at = ctx.status.goodput.at or ctx.status.start_time  # which the first write has
    every = ctx.observed.progress_every if ctx.round.committed else ctx.observed.words_every
    return 0.0 if at is None else max(0.0, every - ctx.elapsed(at))
