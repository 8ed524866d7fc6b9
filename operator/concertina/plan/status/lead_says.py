"""Sentences from the lead's report that the status shows as long as they hold, each with an event when it changes.

They say why workers do not start warm (all replicas have one image and command), why the tracker takes nothing, and how
the workers train in worlds of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from concertina.api.launchers import REMEDY
from concertina.api.spec import Launcher
from concertina.api.status import ConditionType, JobStatus
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase


@dataclass(frozen=True)
class Said:
    type: str
    reason: str
    before: str
    after: str = ""
    """Around the sentence, in the event."""


SENTENCES: Mapping[str, Said] = {
    "starts_plainly": Said("Normal", "StartsPlainly", "workers start plainly, not warm"),
    "imports_anew": Said("Normal", "ImportsAnew", "each worker imports by itself"),
    "world_mismatch": Said("Warning", "WorldMismatch", "each replica trains alone", f". To train together, {REMEDY}"),
    "tracking": Said("Warning", "TrackerUnreachable", "training goes on; what is to be tracked is kept on the node"),
}
"""By the field's name in the report and in the status."""
LONGEST = 1000
"""Characters of an event's message."""
MISMATCH = "world_mismatch"
UNDER_WAY = (Phase.STARTING, Phase.TRAINING, Phase.DRAINING, Phase.RECOVERING)
"""Phases in which a job trains alone, or is about to again."""


def sentence(ctx: JobContext, field: str) -> str | None:
    """Return what the lead says, or said last; under torchrun there is no lead."""
    if ctx.spec.launcher is Launcher.TORCHRUN:
        return None
    report = ctx.round.report
    found: str | None = getattr(ctx.status if report is None else report, field)
    return found[:1024] if found else None


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    found = []
    for field, said in SENTENCES.items():
        now = getattr(new, field)
        if now is not None and now != getattr(old, field):
            found.append(Event(said.type, said.reason, text(field, now)))
    return tuple(found)


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """Return a decision that says that each replica trains alone, if so: as Degraded, and when the job completes."""
    mismatch = sentence(ctx, MISMATCH)
    if mismatch is None:
        return decision
    message = text(MISMATCH, mismatch)
    if decision.phase is Phase.COMPLETE and not ctx.status.is_true(ConditionType.COMPLETE):
        return replace(decision, message=f"{decision.message}; {message}")
    if decision.stalled or decision.phase not in UNDER_WAY:
        return decision
    return replace(decision, stalled=SENTENCES[MISMATCH].reason, stalled_message=message, goes_on=True)


def text(field: str, now: str) -> str:
    """Return what people are told of a sentence."""
    before, after = f"{SENTENCES[field].before}: ", SENTENCES[field].after
    return before + now[: LONGEST - len(before) - len(after)] + after
