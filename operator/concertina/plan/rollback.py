"""What the world went back from: states beyond it are void, and samples that were left out stay so."""

from __future__ import annotations

from concertina.api.status import JobStatus, Rollback, SampleRange, rfc3339
from concertina.plan.look import Look

MOST_RANGES = 32


def seen(look: Look) -> Rollback | None:
    """The last one, or that which the report of this round asks for. All ranks say the same; some may say nothing."""
    old = look.status.rollback
    asked = [failure for failure in (look.report.failures if look.report else ()) if failure.rollback]
    if not asked or (old and old.round >= look.world.round):
        return old
    first = next((failure for failure in asked if not failure.secondary), asked[0])
    step = min(failure.rollback.step for failure in asked if failure.rollback)
    return Rollback(
        round=look.world.round,
        step=step,
        reason=first.reason,
        message=first.message[:1000],
        at=rfc3339(round(look.now, 3)),
    )


def skipped(look: Look) -> tuple[SampleRange, ...]:
    """What anybody has said was left out; it only grows."""
    told = [(some.begin, some.end) for some in look.status.skipped]
    before = len(told)
    if look.report:
        told += look.report.progress.skipped if look.report.progress else ()
        for failure in look.report.failures:
            told += failure.rollback.skipped if failure.rollback else ()
    if len(told) == before:
        return look.status.skipped
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(told):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(SampleRange(begin=begin, end=end) for begin, end in joined[:MOST_RANGES])


def undone(round: int, step: int, status: JobStatus) -> bool:
    """Whether a state of this job was trained beyond the step that the world went back to."""
    back = status.rollback
    return back is not None and round <= back.round and step > back.step
