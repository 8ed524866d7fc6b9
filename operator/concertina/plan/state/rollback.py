"""What the world went back from: states beyond it are void, and samples that were left out stay so (decision "A
rollback is a new round from an older state")."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api.internal import UndoneStates
from concertina.api.status import MOST_DAMAGED, DamagedCheckpoint, JobStatus, Rollback, SampleRange, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina_protocol import Failure, Undone
from concertina_protocol.messages.ranges import MOST_RANGES, united, words
from concertina_protocol.messages.undone import joined


def seen(ctx: JobContext) -> Rollback | None:
    """The last one, or that which the report of this round asks for. All ranks say the same; some may say nothing."""
    old = ctx.status.rollback
    asked = [failure for failure, back in _asked(ctx) if back.undoes(ctx.observed.job.uid)]
    if not asked or (old and old.round >= ctx.world.round):
        return old
    first = next((failure for failure in asked if not failure.secondary), asked[0])
    step = max(0, min(failure.rollback.step for failure in asked if failure.rollback))
    return Rollback(
        round=ctx.world.round,
        step=step,
        reason=first.reason,
        message=first.message[:1000],
        at=rfc3339(round(ctx.now, 3)),
    )


def _asked(ctx: JobContext) -> list[tuple[Failure, protocol.Rollback]]:
    """Failures of this round that ask to go back, and how far."""
    failures = ctx.round.report.failures if ctx.round.report else ()
    return [(failure, failure.rollback) for failure in failures if failure.rollback]


def damaged(ctx: JobContext) -> tuple[DamagedCheckpoint, ...] | None:
    """Return status.damagedCheckpoints: those known, and those that the report of this round finds damaged. The lowest
    step to go back to counts where ranks name several for one checkpoint."""
    old = ctx.status.damaged_checkpoints
    known = {bad.uri for bad in old or ()}
    found: dict[str, DamagedCheckpoint] = {}
    for _, back in sorted(_asked(ctx), key=lambda asked: asked[1].step, reverse=True):
        if (bad := back.damaged) is not None and bad.uri not in known:
            found[bad.uri] = DamagedCheckpoint(
                uri=bad.uri, step=bad.step, previous_step=max(0, back.step), at=rfc3339(round(ctx.now, 3))
            )
    return (*(old or ()), *found.values())[-MOST_DAMAGED:] if found else old


def voided(ctx: JobContext) -> tuple[UndoneStates, ...]:
    """For status.internal.undone: by all rollbacks, the one that the report asks for included."""
    old, back = ctx.status, seen(ctx)
    if back is None or (old.internal.undone and back is old.rollback):
        return old.internal.undone
    together = joined(undone(old), Undone(back.round, back.step))
    return tuple(UndoneStates(round=some.round, step=some.step) for some in together)


def skipped(ctx: JobContext) -> tuple[SampleRange, ...]:
    """What anybody has said was left out; it only grows."""
    report = ctx.round.report
    told = [report.progress.skipped] if report and report.progress else []
    told += [back.skipped for _, back in _asked(ctx)]
    if not any(told):
        return ctx.status.skipped
    together = united(((some.begin, some.end) for some in ctx.status.skipped), *told)
    # Never more: the workers end with a sentence (`anomalies`) before they leave out as much.
    return tuple(SampleRange(begin=begin, end=end) for begin, end in together[:MOST_RANGES])


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """What was undone, and what is left out from now on."""
    back, found = new.rollback, []
    if new.damaged_checkpoints != old.damaged_checkpoints:
        known = {bad.uri for bad in old.damaged_checkpoints or ()}
        found += [_damage_event(bad) for bad in new.damaged_checkpoints or () if bad.uri not in known]
    elif back is not None and back != old.rollback:
        message = f"round {back.round} is undone back to step {back.step} or before: {back.message}"
        found.append(Event("Warning", "RolledBack", message[:1000]))
    if new.skipped != old.skipped:
        left_out = words(tuple((some.begin, some.end) for some in new.skipped))
        found.append(Event("Warning", "SamplesLeftOut", f"{left_out} are left out of the run"[:1000]))
    return tuple(found)


def _damage_event(bad: DamagedCheckpoint) -> Event:
    message = f"training goes on from the checkpoint of step {bad.previous_step} or before"
    return Event("Warning", "CheckpointDamaged", f"{bad.uri} (step {bad.step}) is damaged: {message}"[:1000])


def undone(status: JobStatus) -> tuple[Undone, ...]:
    """What rollbacks have made void, the last one's at the end. Of two the later alone would not do: where it went back
    to a later step, it says nothing of what the earlier one undid (decision "All rollbacks are remembered")."""
    if status.rollback is None and not status.internal.undone:
        return ()
    known, back = tuple(Undone(some.round, some.step) for some in status.internal.undone), status.rollback
    return joined(known, Undone(back.round, back.step)) if back else known


def is_undone(round: int, step: int, status: JobStatus) -> bool:
    """Whether a state of this job was trained beyond a step that the world went back to."""
    return any(void.covers(round, step) for void in undone(status))
