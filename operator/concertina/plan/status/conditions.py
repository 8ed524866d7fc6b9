"""Conditions from a decision: a table of phases. Ready's reason is the phase itself, the word that kubectl shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from concertina.api.status import Condition, ConditionType, JobStatus, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts.decision import Decision, Phase

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
NOT_STALLED = "Progressing"
LONGEST = 1024
"""Of a message: a sentence or two. What a worker printed stands in status.lastFailure."""


def conditions(decision: Decision, old: JobStatus, generation: int, now: float) -> tuple[Condition, ...]:
    """All six in a fixed order; a transition time changes with the status alone."""
    row, reason, message = TABLE[decision.phase], decision.reason, decision.message
    stalled = row.stalled or bool(decision.stalled)
    wanted = (
        (ConditionType.READY, True, row.ready, decision.phase.value, message),
        (ConditionType.RUNNING, True, row.running, reason, message),
        (ConditionType.SUSPENDED, row.suspended, row.suspended, reason if row.suspended else "NotSuspended", message),
        (ConditionType.COMPLETE, row.complete, row.complete, reason if row.complete else "NotComplete", message),
        (ConditionType.FAILED, row.failed, row.failed, reason if row.failed else "NotFailed", message),
        (
            ConditionType.STALLED,
            stalled,
            stalled,
            decision.stalled or reason if stalled else NOT_STALLED,
            decision.stalled_message or message,
        ),
    )
    before = {condition.type: condition for condition in old.conditions}
    return tuple(
        _condition(
            before.get(type), type, "True" if true else "False", why, sentence if explained else "", generation, now
        )
        for type, explained, true, why, sentence in wanted
    )


def only_reworded(before: tuple[Condition, ...], after: tuple[Condition, ...]) -> bool:
    """Whether nothing but messages may be other than they were."""
    return _without_messages(before) == _without_messages(after)


def _without_messages(those: tuple[Condition, ...]) -> list[object]:
    return [(each.type, each.status, each.reason, each.observed_generation) for each in those]


ANNOUNCED = frozenset(
    phase.value
    for phase in (Phase.COMPLETE, Phase.FAILED, Phase.STALLED, Phase.SUSPENDED, Phase.TRAINING, Phase.SUSPENDING)
)
"""Phases that someone waits for."""
STARTS = frozenset((Phase.STARTING.value, Phase.RECOVERING.value))
"""Phases that a round's event has told of by the time it trains."""


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """One where the job enters such a phase (decision "An event tells what the status would not")."""
    before, ready, running = (
        old.condition(ConditionType.READY),
        new.condition(ConditionType.READY),
        new.condition(ConditionType.RUNNING),
    )
    if ready is None or running is None or ready.reason not in ANNOUNCED or (before and before.reason == ready.reason):
        return ()
    if ready.reason == Phase.TRAINING.value and before and before.reason in STARTS:
        return ()
    bad = ready.reason in (Phase.FAILED.value, Phase.STALLED.value)
    return (Event("Warning" if bad else "Normal", running.reason, running.message),)


def _condition(
    before: Condition | None, type: str, status: Status, reason: str, message: str, generation: int, now: float
) -> Condition:
    message = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
    same = before is not None and before.status == status
    if before and same and (before.reason, before.message, before.observed_generation) == (reason, message, generation):
        return before
    return Condition(
        type=type,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=before.last_transition_time if before and same else rfc3339(now),
        observed_generation=generation,
    )
