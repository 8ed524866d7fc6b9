"""Derive the job's conditions from a decision, by a table of phases.

The reason of the Ready condition is the phase itself, which kubectl shows in a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from concertina.api.status import Condition, ConditionType, JobStatus, rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts.decision import Decision, Phase

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class ConditionRow:
    """Values of the conditions in one phase of a job: for each condition, whether it is true."""

    ready: bool = False
    reconciling: bool = False
    """True if the operator is still changing the job towards its spec."""
    running: bool = False
    suspended: bool = False
    complete: bool = False
    failed: bool = False
    stalled: bool = False


TABLE = {
    Phase.WAITING: ConditionRow(reconciling=True),
    Phase.STARTING: ConditionRow(reconciling=True),
    Phase.TRAINING: ConditionRow(ready=True, running=True),
    Phase.DRAINING: ConditionRow(reconciling=True, running=True),
    Phase.RECOVERING: ConditionRow(reconciling=True),
    Phase.SUSPENDING: ConditionRow(reconciling=True, running=True),
    Phase.SUSPENDED: ConditionRow(ready=True, suspended=True),
    # As for a suspended Job: tools that wait for readiness (kstatus) must not wait for a queue.
    Phase.QUEUED: ConditionRow(ready=True, suspended=True),
    Phase.DELETING: ConditionRow(reconciling=True, running=True),
    Phase.STALLED: ConditionRow(stalled=True),
    Phase.COMPLETE: ConditionRow(ready=True, complete=True),
    Phase.FAILED: ConditionRow(failed=True, stalled=True),
}
STOPPING = (Phase.DRAINING, Phase.SUSPENDING, Phase.DELETING)
"""Phases in which the workers of a round are stopping."""
OURS = frozenset(ConditionType)
ALWAYS_PRESENT = frozenset((ConditionType.READY, ConditionType.RECONCILING, ConditionType.RUNNING))
MOST = 32
"""Largest number of conditions in a status, which the CRD limits too."""
LONGEST = 1024
"""Maximum length of a condition's message in characters.

`status.lastFailure` contains the output of a failed worker.
"""


@dataclass(frozen=True)
class AtWork:
    """Number of replicas in the round, and number of replicas that the spec asks for.

    A round is a period in which a fixed set of replicas trains.
    """

    replicas: int = 0
    """Number of replicas in the round."""
    wanted: int = 0
    """Number of replicas in the largest valid round that the spec allows."""
    stopped: bool = True
    """True if no worker runs any more. The value is used only in the phases of STOPPING."""


def conditions(
    decision: Decision, old: JobStatus, generation: int, now: float, at_work: AtWork, template_outdated: str = ""
) -> tuple[Condition, ...]:
    """Return the job's conditions in a fixed order, followed by the conditions of other controllers.

    Ready, Reconciling and Running are always present. Any other condition is added when it first becomes true, and
    stays from then on, as Complete and Failed of a Kubernetes Job do. Conditions of other controllers are not changed
    (decision "Conditions of other controllers are carried over"). The transition time changes only with the status of
    the condition.
    """
    row, reason, message = TABLE[decision.phase], decision.reason, decision.message
    trouble, trouble_message = decision.stalled or reason, decision.stalled_message or message
    degraded = bool(decision.stalled) and decision.goes_on
    stalled = row.stalled or (bool(decision.stalled) and not decision.goes_on)
    running = row.running and not (decision.phase in STOPPING and at_work.stopped)
    missing = decision.phase is Phase.TRAINING and at_work.replicas != at_work.wanted
    # Tools wait while Reconciling is true. If a person must act, only Stalled is true.
    reconciling = (row.reconciling or missing) and not stalled
    ready = row.ready and not (missing or stalled)
    named = (
        (ConditionType.READY, ready, decision.phase.value, decision.phase.value, message),
        (ConditionType.RECONCILING, reconciling, _scaling(at_work) if missing else reason, "NotReconciling", message),
        (ConditionType.RUNNING, running, reason, reason, message),
        (ConditionType.SUSPENDED, row.suspended, reason, "NotSuspended", message),
        (ConditionType.COMPLETE, row.complete, reason, "NotComplete", message),
        (ConditionType.FAILED, row.failed, reason, "NotFailed", message),
        (ConditionType.STALLED, stalled, trouble, "NotStalled", trouble_message),
        (ConditionType.DEGRADED, degraded, trouble, "NotDegraded", trouble_message),
    )
    explained = (ConditionType.READY, ConditionType.RUNNING)
    last_conditions = {condition.type: condition for condition in old.conditions}
    ours = [
        _condition(
            last_conditions.get(type),
            type,
            "True" if true else "False",
            why if true else why_not,
            sentence if true or type in explained else "",
            generation,
            now,
        )
        for type, true, why, why_not, sentence in named
        if true or type in ALWAYS_PRESENT or type in last_conditions
    ]
    if template_outdated:
        type = ConditionType.TEMPLATE_OUTDATED
        last = last_conditions.get(type)
        ours.append(_condition(last, type, "True", "KubernetesIsNewer", template_outdated, generation, now))
    foreign_conditions = [condition for condition in old.conditions if condition.type not in OURS]
    return (*ours, *foreign_conditions[: MOST - len(ours)])


def _scaling(at_work: AtWork) -> str:
    return "ReplicasMissing" if at_work.replicas < at_work.wanted else "Shrinking"


def only_reworded(last_conditions: tuple[Condition, ...], new_conditions: tuple[Condition, ...]) -> bool:
    """Return whether the conditions differ only in their messages, or not at all."""
    return _without_messages(last_conditions) == _without_messages(new_conditions)


def _without_messages(conditions: tuple[Condition, ...]) -> list[object]:
    return [
        (condition.type, condition.status, condition.reason, condition.observed_generation) for condition in conditions
    ]


ANNOUNCED = frozenset(
    phase.value
    for phase in (
        Phase.COMPLETE,
        Phase.DELETING,
        Phase.FAILED,
        Phase.STALLED,
        Phase.QUEUED,
        Phase.SUSPENDED,
        Phase.SUSPENDING,
        Phase.TRAINING,
    )
)
"""Phases that get an event when the job enters them, because a user may wait for them."""
STARTS = frozenset((Phase.STARTING.value, Phase.RECOVERING.value))
"""Phases after which the phase Training gets no event, because the event of the round has already reported the start.
"""


def events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return an event if the job enters one of the ANNOUNCED phases.

    Decision "Events do not repeat conditions" gives the reason.
    """
    last_ready, ready, running = (
        old.condition(ConditionType.READY),
        new.condition(ConditionType.READY),
        new.condition(ConditionType.RUNNING),
    )
    if (
        ready is None
        or running is None
        or ready.reason not in ANNOUNCED
        or (last_ready and last_ready.reason == ready.reason)
    ):
        return ()
    if ready.reason == Phase.TRAINING.value and last_ready and last_ready.reason in STARTS:
        return ()
    bad = ready.reason in (Phase.FAILED.value, Phase.STALLED.value)
    return (Event("Warning" if bad else "Normal", running.reason, running.message),)


def _condition(
    last_condition: Condition | None, type: str, status: Status, reason: str, message: str, generation: int, now: float
) -> Condition:
    message = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
    is_same_status = last_condition is not None and last_condition.status == status
    if (
        last_condition
        and is_same_status
        and (last_condition.reason, last_condition.message, last_condition.observed_generation)
        == (reason, message, generation)
    ):
        return last_condition
    return Condition(
        type=type,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=last_condition.last_transition_time if last_condition and is_same_status else rfc3339(now),
        observed_generation=generation,
    )
