"""Data types for the output of plan(). A `Plan` lists everything that the operator should do after one observation.

The shell (`concertina.controller.reconcile`) applies a Plan in this order:
  1. The shell writes the status in one JSON patch. The patch tests that the job's uid and `status.world.claim` (the
     last decision to begin a round) are still as observed. If that test fails, the shell does nothing else, and the
     operator observes and plans the job again.
  2. The shell starts the calls to agents, which run in the background.
  3. The shell opens the status streams of the agents in `Plan.watch`, and closes all other streams of the job.
  4. The shell records the events.
  5. The shell starts to create and delete objects in the background, a limited number at a time
     (`concertina.controller.writes`). No planning pass waits for a write, and writes run in parallel. There is one
     exception: a write to a Kueue Workload and the creation of the job's pods never overlap. A write that has not
     finished by the next pass is planned again.

A new claim is therefore in the status before any agent gets the Prepare call for it. A committed claim (with the
members of the round) is in the status before any agent gets its Assign call. A job can recover even if its pods can't
be created.

The message Prepare asks a replica to join the next round. A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.api.status import JobStatus
from concertina.plan.kueue import FinishReason, PodChanges, PodSet, Request
from concertina.plan.observed import GangApi, PodGroup


@dataclass(frozen=True)
class CreateSecret:
    pass


@dataclass(frozen=True)
class Rendezvous:
    """Parameters with which the operator starts torchrun in a member's pod, with `launcher: Torchrun`."""

    address: str
    """Address (host:port) of the pod that serves torchrun's TCPStore."""
    round: int
    least: int
    """Minimum number of replicas that torchrun needs to start."""


@dataclass(frozen=True)
class PodQuota:
    """Kueue quota that a new pod uses: the Workload that holds the quota, and the pod set in it."""

    lender: tuple[str, int]
    """Name of the admitted Workload whose quota the pod uses, and the total number of pods of that Workload.

    If either value has changed by the time of the write, the operator does not create the pod.
    """
    pod_set: PodSet
    changes: PodChanges = field(default=PodChanges(), hash=False)
    """Labels, tolerations and other fields that the pod gets because of Kueue's admission."""


@dataclass(frozen=True)
class ApplyPodGroup:
    """Create the job's pod group, or update its minimum number of pods."""

    group: PodGroup


@dataclass(frozen=True)
class DeletePodGroup:
    """Delete the job's pod group (of a gang scheduler), because no pod of the job refers to the group any more."""

    api: GangApi
    name: str


@dataclass(frozen=True)
class CreatePod:
    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    """Nodes on which the pod should not run if another node has enough free resources (a preference)."""
    never_nodes: tuple[str, ...] = ()
    """Nodes on which the pod must not run (a requirement), because other nodes have enough free resources."""
    standby: bool = False
    """True if the pod is for a standby replica. The pod preferably runs on a node without other replicas of the job."""
    snapshot_memory: int | None = None
    """Upper bound in bytes for the snapshots of the bundled trainer in the pod's memory; None if they are unbounded."""
    rendezvous: Rendezvous | None = None
    """Parameters for torchrun; None if the job uses agents instead of torchrun."""
    quota: PodQuota | None = None
    """Quota that the pod uses; None if the job has no queue."""
    pod_group: PodGroup | None = None
    """Pod group that the pod joins; None if a gang scheduler does not place the pod."""


@dataclass(frozen=True)
class CreateRendezvous:
    """Create the pod that serves torchrun's TCPStore."""

    round: int
    quota: PodQuota | None = None
    """Quota that the pod uses; None if the job has no queue."""


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    reason: str
    force: bool = False
    """Whether to delete the pod with a grace period of 0, so that deletion does not wait for its node.

    True if the node is out of service. Also true if the node does not answer and a fence keeps the pod's agent out of
    the job.
    """


@dataclass(frozen=True)
class EndPod:
    """Stop the containers of a pod without deleting the pod. The pod becomes Failed and its logs stay readable."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job, because `spec.ttlSecondsAfterFinished` has passed since its end."""


@dataclass(frozen=True)
class CreateEvaluationJob:
    """Create the Kubernetes Job that evaluates a checkpoint, as `spec.evaluationJob` describes."""

    name: str
    uri: str
    step: int


@dataclass(frozen=True)
class DeleteEvaluationJob:
    """Delete a Job of `spec.evaluationJob` and its pods, because newer Jobs exist."""

    name: str


@dataclass(frozen=True)
class CreateWorkload:
    """Create a Workload, which requests quota from a Kueue queue."""

    number: int
    request: Request
    priority: int
    by_class: bool = True
    """True if the Workload names the job's priority class. Kueue does not allow to add the name later."""
    elastic: bool = False
    replaces: str = ""
    """Name of the Workload that the new Workload replaces once it is admitted."""
    slice_name: str = ""
    shrunk_at: float | None = None
    """Time at which the job last shrank because of a preemption, in Unix seconds; None if it never did."""


@dataclass(frozen=True)
class WorkloadKey:
    """Identity and version of a Workload (Kueue's request for quota).

    The API server refuses a write if the Workload no longer has this uid and resourceVersion.
    """

    name: str
    uid: str
    version: str


@dataclass(frozen=True)
class EditWorkload:
    """Change the spec of a Workload without returning quota. A field that is None stays as it is."""

    key: WorkloadKey
    request: Request | None = None
    """New number of pods by pod set; None to leave it unchanged.

    With `template`, the operator also rewrites the pod sets.
    """
    template: bool = False
    priority: int | None = None
    queue: str | None = None
    active: bool | None = None


@dataclass(frozen=True)
class ShrinkWorkload:
    """Lower the pod counts of a Workload that has quota.

    The action has no effect if the job has more pods than the new counts.
    """

    key: WorkloadKey
    request: Request
    eviction: str = ""
    """Transition time of the Evicted condition to which the shrinking responds; empty if there was no eviction."""


@dataclass(frozen=True)
class ReleaseWorkload:
    """Return the quota of an evicted Workload. The action has no effect while the job has pods."""

    key: WorkloadKey


@dataclass(frozen=True)
class FinishWorkload:
    """Set the Finished condition of a Workload, so that Kueue frees the quota.

    The action has no effect if the job has more than `pods_left` pods.
    """

    key: WorkloadKey
    reason: FinishReason
    message: str
    pods_left: int = 0


@dataclass(frozen=True)
class DropWorkload:
    """Remove Kueue's finalizer from a Workload and delete the Workload.

    The action has no effect if the job has more than `pods_left` pods.
    """

    key: WorkloadKey
    pods_left: int | None = 0
    """Largest number of pods that the job may still have.

    None for any number, which is safe if the Workload has no quota.
    """
    delete: bool = True


@dataclass(frozen=True)
class ReportPodsReady:
    """Set the PodsReady condition of a Workload. Kueue needs it if `waitForPodsReady` is configured."""

    key: WorkloadKey
    ready: bool


WorkloadWrite = (
    CreateWorkload | EditWorkload | ShrinkWorkload | ReleaseWorkload | FinishWorkload | DropWorkload | ReportPodsReady
)


@dataclass(frozen=True)
class Send:
    """Call one agent (the process in a replica's pod that starts the workers).

    The operator does not repeat a call that is in progress or answered. Two calls are the same if their kind, their
    round and their claim (the operator's decision to begin the round) are equal. There are two exceptions. A call that
    failed (`Call.error`) is sent again. A Drain call is sent again if the drain must now end with a durable checkpoint.
    From the moment at which the operator sends the call, the agent's `AgentView` contains it.

    In a drain, all ranks stop after the same step. A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    address: str
    message: protocol.Prepare | protocol.Assign | protocol.Release | protocol.Drain | protocol.Save


Action = (
    CreateSecret
    | ApplyPodGroup
    | DeletePodGroup
    | CreatePod
    | CreateRendezvous
    | DeletePod
    | EndPod
    | DeleteJob
    | CreateEvaluationJob
    | DeleteEvaluationJob
    | WorkloadWrite
    | Send
)


@dataclass(frozen=True)
class Event:
    type: str
    """Normal or Warning."""
    reason: str
    message: str


class SpanName(enum.StrEnum):
    """Name of a span in a round's trace.

    The names of the start phases, GROUP to FIRST_STEP, are the keys of `Progress.timeline`.

    A round is a period in which a fixed set of replicas trains.
    """

    ROUND = "round"
    """Span of the whole round, from the end of the previous training (or from the claim) to the first step.
    """
    DETECT = "detect"
    DRAIN = "drain"
    DECIDE = "decide"
    PREPARE = "prepare"
    PREPARE_MEMBER = "prepare member"
    ASSIGN = "assign"
    START = "start"
    GROUP = "group"
    BUILD = "build"
    RESTORE = "restore"
    COMPILE = "compile"
    """Span of the compilation within the first step. The span FIRST_STEP covers the rest of the step."""
    FIRST_STEP = "first_step"


@dataclass(frozen=True)
class Span:
    name: SpanName
    begin: float
    end: float
    """End of the span in Unix seconds by this operator's clock. It is not earlier than `begin`."""
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""
    """Error message, as a sentence; empty if no error occurred."""


@dataclass(frozen=True)
class RoundTrace:
    round: int
    root: Span


@dataclass(frozen=True)
class Plan:
    status: JobStatus
    actions: tuple[Action, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the agents to which a status stream should be open, keyed by replica."""
    events: tuple[Event, ...] = ()
    recheck_after: float | None = None
    """Seconds until the next planning pass if no event causes an earlier one; None if only an event causes one."""
    trace: RoundTrace | None = None
    """New trace of the current or aborted round; None to leave the recorded trace unchanged."""
    only_numbers: bool = False
    """True if the new status differs from the old status only in numbers and messages.

    A new plan from such a status would be the same, so the status write causes no planning pass.
    """
    silent: tuple[str, ...] = ()
    """Uids of pods whose agents do not answer, without another sign of failure.

    The pod that is silent longest comes first. The shell limits how many of these pods it treats as dead at a time
    (`JobObservation.given_up`).
    """
    only_conditions: bool = False
    """True if the new status differs from the old status only in conditions, numbers and messages.

    Actions then need not wait for the status write.
    """
