"""The decision of a policy: the phase of the job, the reason for it, and what follows."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from concertina.api.internal import RequeueState
from concertina.api.restarts import LastFailure, Restart
from concertina.api.world import World
from concertina.plan.actions import Action, Event


class Reason(enum.StrEnum):
    """Reasons that several policies know, in the operator's words. Agents name a failure by a `FailureReason`."""

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
    """All wait alike: only a new round can help."""
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
"""Reasons of claims before which nothing failed."""


@dataclass(frozen=True)
class RoundTrigger:
    """Why a new round is needed: a planned change, unless it is a `Failure`."""

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
    """What stays the same when the same failure happens again (`repeats.signature`)."""
    step: int | None = None
    """Last step that the failed worker reported, or None."""


class Phase(enum.Enum):
    """Where a job stands. Its conditions follow from it (`conditions`), and where its time goes (`progress`)."""

    WAITING = "Waiting"
    STARTING = "Starting"
    TRAINING = "Training"
    DRAINING = "Draining"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    DELETING = "Deleting"
    STALLED = "Stalled"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """The job has ended, for good."""
        return self in (Phase.COMPLETE, Phase.FAILED)


class Pods(enum.Enum):
    """What should become of the pods."""

    WANTED = "wanted"
    """As many as the spec wants, the dead replaced; how, depends on spec.launcher."""
    NONE = "none"
    """All deleted."""
    ENDED = "ended"
    """The job has ended: as spec.cleanPodPolicy says."""
    KEPT = "kept"
    """Left as they are."""


@dataclass(frozen=True)
class Decision:
    phase: Phase
    reason: str
    """One word in CamelCase: the condition's reason."""
    message: str
    """A sentence: the condition's message."""
    world: World | None = None
    """The world from now on; None: as it was."""
    restart: Restart | None = None
    """A failure that this decision answers."""
    last_failure: LastFailure | None = None
    """The same, in the words of who failed."""
    replayed: int = 0
    """Steps that will be trained again."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    """Seconds until time alone changes the decision."""
    pods: Pods = Pods.WANTED
    requeue_state: RequeueState | None = None
    """Room that is released for others, from now on or still."""
    stalled: str = ""
    """Why a person must act: reason of the condition Stalled, or of Degraded where training goes on."""
    stalled_message: str = ""
    goes_on: bool = False
    """Training goes on in spite of what `stalled` says."""
    watch_all: bool = False
    """Streams to all live replicas, not only to the coordinator and those outside of the round."""


def stalled(reason: str, message: str, pods: Pods) -> Decision:
    """Nothing goes on until a person acts."""
    return Decision(Phase.STALLED, reason, message, stalled=reason, stalled_message=message, pods=pods)
