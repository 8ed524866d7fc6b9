"""Failures in a row: those between which the job made no progress."""

from __future__ import annotations

from concertina.api.status import Restart
from concertina.plan.facts.context import JobContext

SLACK = 1
"""Steps that are no progress: ranks end a step one after the other, so one failure may be seen at either."""
EARLY = 120.0
"""Of a job that tells no steps: a round that failed sooner than this many seconds after its start did nothing."""


def since_progress(ctx: JobContext, failed: Restart) -> tuple[Restart, ...]:
    """Of status.restarts, in order of time, those after which no progress was made until `failed`."""
    row: list[Restart] = []
    later = failed
    for entry in reversed(ctx.recent):
        if progressed(ctx, entry, later):
            break
        row.append(entry)
        later = entry
    return tuple(reversed(row))


def progressed(ctx: JobContext, earlier: Restart, later: Restart) -> bool:
    """Whether the round that ended with `later` got beyond the point where `earlier` failed."""
    if ctx.spec.bundled or ctx.status.progress is not None:
        return later.step > earlier.step + SLACK
    return later.after_seconds > EARLY
