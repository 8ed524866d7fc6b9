"""The output of plan(): a `Plan` holds everything that should follow from one observation. Data only.

The shell (`concertina.controller.reconcile`) applies a Plan in this order:
  1. the status, in one JSON patch that tests the job's uid and the `status.world.claim` that was observed. If that
     test fails, nothing else is done, and the job is observed and planned again;
  2. calls to agents, which run in the background;
  3. the watch streams: those of `Plan.watch` are opened, and all others of the job are closed;
  4. the events;
  5. creates and deletes, in the background, a limited number at a time (`concertina.controller.writes`). No pass waits
     for a write, and no write waits for another, except that a write to a Workload of Kueue and the job's creates of
     pods never overlap. A write that is still outstanding at the next pass is planned again.
So a claim is written before any Prepare of it is sent, and a commit before any Assign. A job recovers whether or not
its pods can be created.
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
    """Parameters that a member's torchrun is started with, with `launcher: Torchrun`."""

    address: str
    """Address of the store, as host:port."""
    round: int
    least: int
    """Minimum number of replicas that torchrun needs to start."""


@dataclass(frozen=True)
class PodQuota:
    """Quota that a new pod uses."""

    lender: tuple[str, int]
    """Name of the admitted Workload whose quota the pod uses, and the total number of pods of that Workload. If either
    has changed when the pod is written, the pod is not created."""
    pod_set: PodSet
    changes: PodChanges = field(default=PodChanges(), hash=False)
    """Changes that the admission makes to the pod."""


@dataclass(frozen=True)
class ApplyPodGroup:
    """Create the job's pod group, or bring its minimum up to date."""

    group: PodGroup


@dataclass(frozen=True)
class DeletePodGroup:
    """Delete the job's pod group: no pod of the job refers to it."""

    api: GangApi
    name: str


@dataclass(frozen=True)
class CreatePod:
    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    """Nodes on which the pod should preferably not run."""
    never_nodes: tuple[str, ...] = ()
    """Nodes on which the pod must not run. Other nodes have room for it."""
    standby: bool = False
    """Whether the pod is for a standby replica, preferably on a node without any other replica of the job."""
    snapshot_memory: int | None = None
    """Upper bound in bytes for the snapshots of the bundled trainer; None if they are unbounded."""
    rendezvous: Rendezvous | None = None
    """Parameters for torchrun; None if agents run in the pods."""
    quota: PodQuota | None = None
    """Quota that the pod uses; None if the job has no queue."""
    pod_group: PodGroup | None = None
    """Pod group that the pod joins, or None."""


@dataclass(frozen=True)
class CreateRendezvous:
    """Create the pod that serves torchrun's store."""

    round: int
    quota: PodQuota | None = None
    """Quota that the pod uses; None if the job has no queue."""


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    reason: str
    force: bool = False
    """Whether the grace period is 0: the node is out of service, or it does not answer and the pod is fenced out."""


@dataclass(frozen=True)
class EndPod:
    """Stop the containers of a pod; the pod has then failed, and stays with its logs."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job: its TTL after the end has passed."""


@dataclass(frozen=True)
class CreateWorkload:
    """Ask a queue of Kueue for quota."""

    number: int
    request: Request
    priority: int
    by_class: bool = True
    """Whether the Workload names the priority class of the job, which can't be added later."""
    elastic: bool = False
    replaces: str = ""
    """Name of the Workload that the new Workload replaces once it is admitted."""
    slice_name: str = ""
    shrunk_at: float | None = None
    """When the job last shrank because of a preemption, in Unix seconds."""


@dataclass(frozen=True)
class WorkloadKey:
    """Identity and version of the Workload that a write expects. If the Workload has changed, it is not written to."""

    name: str
    uid: str
    version: str


@dataclass(frozen=True)
class EditWorkload:
    """Change the spec of a Workload without giving quota back. None leaves a field as it is."""

    key: WorkloadKey
    request: Request | None = None
    """Number of pods by set; with `template`, all pod sets are written anew."""
    template: bool = False
    priority: int | None = None
    queue: str | None = None
    active: bool | None = None


@dataclass(frozen=True)
class ShrinkWorkload:
    """Lower the counts of a Workload that holds quota, if no more than the given number of pods are left."""

    key: WorkloadKey
    request: Request
    eviction: str = ""
    """Transition time of the condition Evicted for which the job shrinks; empty if there is none."""


@dataclass(frozen=True)
class ReleaseWorkload:
    """Give the quota of an evicted Workload back, if no pods are left."""

    key: WorkloadKey


@dataclass(frozen=True)
class FinishWorkload:
    """Set the condition Finished, by which Kueue frees the quota, if no more than `pods_left` pods are left."""

    key: WorkloadKey
    reason: FinishReason
    message: str
    pods_left: int = 0


@dataclass(frozen=True)
class DropWorkload:
    """Remove Kueue's finalizer from a Workload, and delete it, if no more than `pods_left` pods are left."""

    key: WorkloadKey
    pods_left: int | None = 0
    """None if the Workload holds no quota, so that pods do not matter."""
    delete: bool = True


@dataclass(frozen=True)
class ReportPodsReady:
    """Set the condition PodsReady, for which Kueue may wait (waitForPodsReady)."""

    key: WorkloadKey
    ready: bool


WorkloadWrite = (
    CreateWorkload | EditWorkload | ShrinkWorkload | ReleaseWorkload | FinishWorkload | DropWorkload | ReportPodsReady
)


@dataclass(frozen=True)
class Send:
    """A call to one agent.

    A call of the same kind, round and claim that is under way or answered is not sent twice. A call that failed
    (Call.error) is sent again, and so is a Drain that is durable now. The Call is in the AgentView from the moment it
    is sent.
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
    """Name of a span in a round's trace; the names of the phases of a start are the words of `Progress.timeline`."""

    ROUND = "round"
    """The whole round, from the end of training (or from the claim) to the first step."""
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
    FIRST_STEP = "first_step"


@dataclass(frozen=True)
class Span:
    name: SpanName
    begin: float
    end: float
    """Unix seconds by this operator's clock, no earlier than `begin`."""
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""
    """Error message, as a sentence; empty if nothing went wrong."""


@dataclass(frozen=True)
class RoundTrace:
    round: int
    root: Span


@dataclass(frozen=True)
class Plan:
    status: JobStatus
    actions: tuple[Action, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    """Streams that should be open: address by replica."""
    events: tuple[Event, ...] = ()
    recheck_after: float | None = None
    """Seconds until the job must be planned again even if nothing happens."""
    trace: RoundTrace | None = None
    """Trace of the current or aborted round after this pass; None leaves the recorded trace as it is."""
    only_numbers: bool = False
    """Whether only numbers and sentences of the status change. Another pass over such a status would decide the
    same."""
    silent: tuple[str, ...] = ()
    """Uids of pods against which nothing but their silence is known, the longest silent first.

    The shell limits how many of them are given up (`JobObservation.given_up`).
    """
    only_conditions: bool = False
    """Whether the status changes in conditions and numbers only, so that no action waits for its write."""
