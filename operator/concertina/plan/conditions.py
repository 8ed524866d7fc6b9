"""Conditions from a decision: a table of phases. Ready's reason is the phase itself, the word that kubectl shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from concertina.api.status import Condition, JobStatus, rfc3339
from concertina.plan.decision import Decision, Phase

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Row:
    """Whether each condition is true in a phase."""

    ready: bool = False
    running: bool = False
    suspended: bool = False
    complete: bool = False
    failed: bool = False
    stalled: bool = False


TABLE = {
    Phase.WAITING: Row(),
    Phase.STARTING: Row(),
    Phase.TRAINING: Row(ready=True, running=True),
    Phase.DRAINING: Row(ready=True, running=True),
    Phase.RECOVERING: Row(ready=True),
    Phase.SUSPENDING: Row(ready=True),
    Phase.SUSPENDED: Row(ready=True, suspended=True),
    Phase.STALLED: Row(stalled=True),
    Phase.COMPLETE: Row(ready=True, complete=True),
    Phase.FAILED: Row(failed=True, stalled=True),
}
FINAL = ("Complete", "Failed")
"""Conditions that say nothing until they are true."""
NOT_STALLED = "Progressing"


def conditions(decision: Decision, old: JobStatus, generation: int, now: float) -> tuple[Condition, ...]:
    """All six in a fixed order; a transition time changes with the status alone."""
    row = TABLE[decision.phase]
    stalled = row.stalled or bool(decision.stalled)
    wanted = {
        "Ready": (row.ready, decision.phase.value),
        "Running": (row.running, decision.reason),
        "Suspended": (row.suspended, decision.reason if row.suspended else "NotSuspended"),
        "Complete": (row.complete, decision.reason if row.complete else "NotComplete"),
        "Failed": (row.failed, decision.reason if row.failed else "NotFailed"),
        "Stalled": (stalled, (decision.stalled or decision.reason) if stalled else NOT_STALLED),
    }
    messages = {"Stalled": (decision.stalled_message or decision.message) if stalled else ""}
    explained = {"Ready", "Running", *(type for type in FINAL if wanted[type][0])}
    explained |= {"Suspended"} if row.suspended else set()
    result = []
    for type, (true, reason) in wanted.items():
        message = messages.get(type, decision.message if type in explained else "")
        result.append(_condition(type, "True" if true else "False", reason, message, old, generation, now))
    return tuple(result)


def _condition(
    type: str, status: Status, reason: str, message: str, old: JobStatus, generation: int, now: float
) -> Condition:
    before = old.condition(type)
    said = (status, reason, message, generation)
    if before and (before.status, before.reason, before.message, before.observed_generation) == said:
        return before
    return Condition(
        type=type,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=before.last_transition_time if before and before.status == status else rfc3339(now),
        observed_generation=generation,
    )
