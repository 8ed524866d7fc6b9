"""Why workers of a command of one's own start plainly, as the lead says it: all replicas have one image and command."""

from __future__ import annotations

from concertina.api.status import JobStatus
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext


def starts_plainly(ctx: JobContext) -> str | None:
    report = ctx.round.report
    return ctx.status.starts_plainly if report is None else report.starts_plainly or None


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Once for each reason."""
    if new.starts_plainly is None or new.starts_plainly == old.starts_plainly:
        return ()
    return (Event("Normal", "StartsPlainly", f"workers start plainly, not warm: {new.starts_plainly}"[:1000]),)
