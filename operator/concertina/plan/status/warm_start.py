"""What workers of a command of one's own are not spared at each start, as the lead says it: all replicas have one image
and command."""

from __future__ import annotations

from concertina.api.status import JobStatus
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext


def starts_plainly(ctx: JobContext) -> str | None:
    report = ctx.round.report
    return ctx.status.starts_plainly if report is None else report.starts_plainly or None


def imports_anew(ctx: JobContext) -> str | None:
    report = ctx.round.report
    return ctx.status.imports_anew if report is None else report.imports_anew or None


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Once for each reason."""
    found = []
    if new.starts_plainly is not None and new.starts_plainly != old.starts_plainly:
        found.append(Event("Normal", "StartsPlainly", f"workers start plainly, not warm: {new.starts_plainly}"[:1000]))
    if new.imports_anew is not None and new.imports_anew != old.imports_anew:
        found.append(Event("Normal", "ImportsAnew", f"each worker imports by itself: {new.imports_anew}"[:1000]))
    return tuple(found)
