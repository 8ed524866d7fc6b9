"""Sentences of the lead that stand in the status while they are so, and become an event once for each reason: what
workers are not spared at each start (all replicas have one image and command), and why the tracker takes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.api.status import JobStatus
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext


@dataclass(frozen=True)
class Said:
    type: str
    reason: str
    before: str
    """The sentence, in the event."""


SENTENCES: Mapping[str, Said] = {
    "starts_plainly": Said("Normal", "StartsPlainly", "workers start plainly, not warm"),
    "imports_anew": Said("Normal", "ImportsAnew", "each worker imports by itself"),
    "tracking": Said("Warning", "TrackerUnreachable", "training goes on; what is to be tracked is kept on the node"),
}
"""By the field's name in the report and in the status."""


def sentence(ctx: JobContext, field: str) -> str | None:
    report = ctx.round.report
    found: str | None = getattr(ctx.status if report is None else report, field)
    return found[:1024] if found else None


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    found = []
    for field, said in SENTENCES.items():
        now = getattr(new, field)
        if now is not None and now != getattr(old, field):
            found.append(Event(said.type, said.reason, f"{said.before}: {now}"[:1000]))
    return tuple(found)
