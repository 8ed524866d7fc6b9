"""The decision of a policy: the phase of the job, the reason for it, and what follows."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from concertina.api.internal import RequeueState
from concertina.api.restarts import LastFailure, Restart
from concertina.api.status import ConditionType, JobStatus
from concertina.api.world import World
from concertina.plan.actions import Action, Event


class Reason(enum.StrEnum):
    """Reasons that several policies use, in the operator's words. Agents name a failure by a `FailureReason`."""

    FIRST_ROUND = "FirstRound"
    RESUMED = "Resumed"
    GROWING = "Growing"
    SHRINKING = "Shrinking"
    REPLICA_LEAVING = "ReplicaLeaving"
    REPLICA_MOVING = "ReplicaMoving"
    DRAINED = "Drained"
    TEMPLATE_CHANGED = "TemplateChanged"
    NODE_LOST = "NodeLost"
    REPLICA_DELETED = "ReplicaDeleted"
    REPLICA_ENDED = "ReplicaEnded"
    AGENT_RESTARTED = "AgentRestarted"
    ASSIGN_REFUSED = "AssignRefused"
    ASSIGN_FAILED = "AssignFailed"
    HANG = "Hang"
    """One worker is behind: its pod is replaced."""
    COLLECTIVE_HANG = "CollectiveHang"
    """All workers wait in the same way: only a new round can help."""
    STRAGGLER = "Straggler"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    AGENT_NEVER_STARTED = "AgentNeverStarted"
    AGENT_CANNOT_START = "AgentCannotStart"
    NETWORK_PARTITION = "NetworkPartition"
    CONTAINER_RESTARTED = "ContainerRestarted"


PLANNED = frozenset(
    {
        Reason.FIRST_ROUND,
        Reason.GROWING,
        Reason.SHRINKING,
        Reason.REPLICA_LEAVING,
        Reason.REPLICA_MOVING,
        Reason.DRAINED,
        Reason.RESUMED,
    }
)
"""Reasons of claims that no failure preceded."""


@dataclass(frozen=True)
class RoundTrigger:
    """Reason for a new round: a planned change, unless it is a `Failure`."""

    reason: str
    message: str

    @property
    def sentence(self) -> str:
        """The message, bounded for a status."""
        return self.message[:1000]


@dataclass(frozen=True)
class Failure(RoundTrigger):
    """A failure, as the operator observed it.

    `escalation.restart_entry` makes its entry in status.restarts, and `escalation.decide` the `RecoveryDecision`.
    """

    replica: str = ""
    """The replica that failed; empty if none is to blame."""
    counted: bool = False
    """Whether it uses up failurePolicy.maxRestarts."""
    exit_code: int | None = None
    """Exit code of the failed worker."""
    last_lines: tuple[str, ...] = ()
    """Lines that the failed worker printed last."""
    error: str = ""
    """The part of the failure that stays the same when the same failure happens again (`repeats.signature`)."""
    step: int | None = None
    """Last step that the failed worker reported, or None."""


class Phase(enum.Enum):
    """Phase of a job.

    The job's conditions follow from its phase (`conditions`), and so does the accounting of its time (`progress`).
    """

    WAITING = "Waiting"
    STARTING = "Starting"
    TRAINING = "Training"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    QUEUED = "Queued"
    """The job waits for quota of its queue, without pods."""
    DELETING = "Deleting"
    STALLED = "Stalled"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether the job has ended, for good."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Pods(enum.Enum):
    """Treatment of the job's pods."""

    WANTED = "wanted"
    """Pods are created as the spec wants, and dead ones are replaced; the details depend on spec.launcher."""
    NONE = "none"
    """All pods are deleted."""
    ENDED = "ended"
    """The job has ended: spec.cleanPodPolicy applies."""
    KEPT = "kept"
    """Pods are left as they are."""


@dataclass(frozen=True)
class Decision:
    phase: Phase
    reason: str
    """One word in CamelCase: the condition's reason."""
    message: str
    """A sentence: the condition's message."""
    world: World | None = None
    """World from now on; None to leave it as it was."""
    restart: Restart | None = None
    """Failure that this decision responds to."""
    last_failure: LastFailure | None = None
    """The same failure in the words of the replica that failed."""
    replayed: int = 0
    """Steps that will be trained again."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    """Seconds until time alone changes the decision."""
    pods: Pods = Pods.WANTED
    requeue_state: RequeueState | None = None
    """Room that is released for other jobs, from now on or still."""
    stalled: str = ""
    """Reason why a person must act: the reason of the condition Stalled, or of Degraded if training continues."""
    stalled_message: str = ""
    goes_on: bool = False
    """Whether training continues in spite of what `stalled` says."""
    watch_all: bool = False
    """Whether to open streams to all live replicas, not only to the coordinator and those outside of the round."""


def stalled(reason: str, message: str, pods: Pods) -> Decision:
    """Return a decision by which nothing continues until a person acts."""
    return Decision(Phase.STALLED, reason, message, stalled=reason, stalled_message=message, pods=pods)


def as_before(status: JobStatus) -> Decision:
    """Return a decision that repeats what the status says."""
    ready, running = status.condition(ConditionType.READY), status.condition(ConditionType.RUNNING)
    phase = Phase(ready.reason) if ready and ready.reason in Phase._value2member_map_ else Phase.STARTING
    return Decision(phase, running.reason if running else "Assigned", running.message if running else "")
