"""The decision of a policy: the job's new phase, the reason for that phase, and the actions to take."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from concertina.api.internal import RequeueState
from concertina.api.restarts import LastFailure, Restart
from concertina.api.status import ConditionType, JobStatus
from concertina.api.world import World
from concertina.plan.actions import Action, Event


class Reason(enum.StrEnum):
    """Reasons for rounds and failures that several policies of the operator use.

    Reasons that agents report are in `FailureReason`.

    A round is a period in which a fixed set of replicas trains.
    """

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
    """One worker is behind the others, so its pod is replaced."""
    COLLECTIVE_HANG = "CollectiveHang"
    """All workers wait in the same way, so only a new round can help."""
    STRAGGLER = "Straggler"
    HARDWARE_FAULT = "HardwareFault"
    """A GPU or a node of the replica is faulty."""
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
"""Reasons of claims (decisions to begin a round) that are planned changes and not responses to a failure."""


@dataclass(frozen=True)
class RoundTrigger:
    """Reason for a new round (a period of training with fixed members).

    The reason is a planned change, unless the object is a `Failure`.
    """

    reason: str
    message: str

    @property
    def sentence(self) -> str:
        """The message of this reason, cut to the maximum length of a message in the status."""
        return self.message[:1000]


@dataclass(frozen=True)
class Failure(RoundTrigger):
    """A failure of a job, as the operator observed it.

    `escalation.restart_entry` turns the failure into an entry of `status.restarts`. `escalation.decide` chooses the
    recovery action.
    """

    replica: str = ""
    """The replica that failed; empty if no replica is the cause."""
    counted: bool = False
    """True if the failure counts against `failurePolicy.maxRestarts`."""
    exit_code: int | None = None
    """Exit code of the failed worker."""
    last_lines: tuple[str, ...] = ()
    """The last lines that the failed worker printed."""
    error: str = ""
    """The part of the error text that is the same each time the same failure happens (`repeats.signature`)."""
    step: int | None = None
    """Last step that the failed worker reported, or None."""


class Phase(enum.Enum):
    """Phase of a job.

    The job's phase determines the job's conditions (`conditions`) and how its time is accounted (`progress`).
    """

    WAITING = "Waiting"
    STARTING = "Starting"
    TRAINING = "Training"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    QUEUED = "Queued"
    """The job has no pods, because it waits for quota of its queue."""
    DELETING = "Deleting"
    STALLED = "Stalled"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """True if the job has ended and will not run again."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Pods(enum.Enum):
    """Requirement of a policy's decision for the job's pods, such as to keep or delete them."""

    WANTED = "wanted"
    """Create the pods that the spec asks for, and replace dead ones. The details depend on `spec.launcher`."""
    NONE = "none"
    """Delete all pods."""
    ENDED = "ended"
    """Apply `spec.cleanPodPolicy`, because the job has ended."""
    KEPT = "kept"
    """Leave the pods as they are."""


@dataclass(frozen=True)
class Decision:
    phase: Phase
    reason: str
    """Reason of the job's condition: one word in CamelCase."""
    message: str
    """Message of the job's condition: a sentence."""
    world: World | None = None
    """New value of `status.world`; None to leave it unchanged."""
    restart: Restart | None = None
    """Failure that this decision responds to."""
    last_failure: LastFailure | None = None
    """The failure in `restart`, with the error and log lines that the failed replica reported."""
    replayed: int = 0
    """Number of steps that will be trained again because of this decision."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    """Seconds after which the decision may change even without an event; None if only an event can change it."""
    pods: Pods = Pods.WANTED
    requeue_state: RequeueState | None = None
    """New turn state of a job that deletes its pods so that other jobs can start; None if the job does not do so."""
    stalled: str = ""
    """Reason why a person must act, in CamelCase; empty if nobody must act.

    It becomes the reason of the condition Degraded if training continues (`goes_on`), and of the condition Stalled
    otherwise.
    """
    stalled_message: str = ""
    goes_on: bool = False
    """True if training continues although `stalled` names a problem."""
    watch_all: bool = False
    """Whether to open report streams to the agents of all live replicas.

    Otherwise the operator opens streams only to the coordinator (the agent of rank 0) and to replicas outside of the
    round.
    """
    unchanged: bool = False
    """True if the decision's message comes from the status, which already names faulty hardware and stragglers."""


def stalled(reason: str, message: str, pods: Pods) -> Decision:
    """Return a decision that sets the job's phase to Stalled, because the job can't continue until a person acts."""
    return Decision(Phase.STALLED, reason, message, stalled=reason, stalled_message=message, pods=pods)


def as_before(status: JobStatus) -> Decision:
    """Return a decision with the phase and conditions that `status` already has, so that no status write is needed."""
    ready, running = status.condition(ConditionType.READY), status.condition(ConditionType.RUNNING)
    phase = Phase(ready.reason) if ready and ready.reason in Phase._value2member_map_ else Phase.STARTING
    return Decision(
        phase, running.reason if running else "Assigned", running.message if running else "", unchanged=True
    )
