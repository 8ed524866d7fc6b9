"""The input of plan(): `JobObservation` is one consistent observation of one job. Data only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import concertina_protocol as protocol
from concertina.api.spec import JobSpec
from concertina.api.status import EvaluationJobState, JobStatus
from concertina.api.world import Claim
from concertina.plan.kueue import QuotaView


class GangApi(enum.StrEnum):
    """APIs of gang scheduling (group/version) that an API server may serve."""

    POD_GROUP = "scheduling.k8s.io/v1beta1"
    """PodGroup of Kubernetes 1.37 or later."""
    POD_GROUP_ALPHA = "scheduling.k8s.io/v1alpha2"
    """PodGroup of Kubernetes 1.36. Its minimum can't be changed."""
    VOLCANO = "scheduling.volcano.sh/v1beta1"
    COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
    KAI = "scheduling.run.ai/v2alpha2"
    """PodGroup of the KAI scheduler, which KAI creates itself."""
    KARTA = "run.ai/v1alpha1"
    """Karta: a description of the TrainingJob kind from which the KAI scheduler derives a job's minimum."""


@dataclass(frozen=True)
class PodGroup:
    """Pod group of a job: pods that a gang scheduler places together."""

    api: GangApi
    name: str
    """Name of the PodGroup object; empty if the scheduler KAI creates the object."""
    min_count: int
    """Minimum number of pods that must get their nodes together."""
    queue: str = ""
    topology: str = ""
    """Node label whose value must be the same for all nodes of the group; empty for no such rule."""


@dataclass(frozen=True)
class JobView:
    name: str
    namespace: str
    uid: str
    generation: int
    created: float
    """Creation time in Unix seconds. All times in this module are in Unix seconds."""
    deleting: bool
    spec: JobSpec | None
    """Spec of the job; None if the manifest is invalid (see `spec_error`)."""
    spec_error: str
    status: JobStatus
    ignored: tuple[str, ...] = ()
    """Paths of spec fields that this version of the operator does not know. `spec` does not contain these fields."""
    claims_error: str = ""
    """Reason why the number of GPUs in the template's resource claims is unknown; empty if it is known.

    Without this number, the operator can't determine the number of workers for `workersPerReplica: Auto`.
    """
    checkpoint_request: str = ""
    """Value of the annotation with which a user requests a checkpoint."""
    template_hash: str = ""
    """Hash of the spec fields that the job's pods depend on; empty if these contain fields unknown to this version."""
    finalizers: tuple[str, ...] = ()
    """Finalizers of the job. A deleted job exists until all of them are removed."""
    queue: str = ""
    """Name of the Kueue LocalQueue in the job's label; empty without the label."""
    priority_class: str = ""
    """Name of the Kueue WorkloadPriorityClass in the job's label."""
    prebuilt_workload: str = ""
    """Name of an existing Workload, from the job's label. The job uses it instead of a Workload of the operator."""
    request_hash: str = ""
    """Hash of the pod sets that the job requests from Kueue, without pod counts; empty if the spec is invalid.
    """


class PodPhase(enum.StrEnum):
    """Phase of a pod as in Kubernetes, with one exception.

    If a pod's trainer container has ended, the pod counts as ended, even if its other containers still run.
    """

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


UNSCHEDULABLE = "Unschedulable"
"""Value of `PodView.waiting` for a pod for which the scheduler has found no node."""


@dataclass(frozen=True)
class PodView:
    name: str
    uid: str
    index: int | None
    """Index of the pod's replica; None for the pod that serves torchrun's TCPStore."""
    attempt: int
    created: float
    phase: PodPhase
    deleting: bool
    node: str = ""
    ip: str = ""
    waiting: str = ""
    """Reason why the pod does not run yet, such as Unschedulable, ErrImagePull or CrashLoopBackOff."""
    waiting_message: str = ""
    awaited_scheduler: str = ""
    """Name of the pod's scheduler while it has not tried to place the pod yet; empty once it has."""
    avoids: tuple[str, ...] = ()
    """Nodes on which the pod must not run because of a rule that the operator added to the pod."""
    exit_code: int | None = None
    exit_reason: str = ""
    """Reason with which the trainer container ended, such as Error, OOMKilled or Evicted; empty while it runs."""
    exit_message: str = ""
    restarts: int = 0
    """Number of restarts of the trainer container in this pod.

    The fields `last_exit_*` describe the exit before the last restart.
    """
    last_exit_code: int | None = None
    last_exit_reason: str = ""
    priority: int = 0
    """Priority that Kubernetes derived from the pod's priority class."""
    grace: float = 30.0
    """Grace period in seconds: of the deletion in progress, or of the pod's spec if the pod is not being deleted."""
    deletion_at: float | None = None
    """Unix time at which the grace period of the deletion in progress ends; None if the pod is not being deleted."""
    disruption: str = ""
    """Reason of the pod's DisruptionTarget condition, such as EvictionByEvictionAPI or PreemptionByScheduler."""
    lingers: bool = False
    """True if the trainer container has ended while other containers of the pod still run.

    Such a pod holds its resources until it is deleted.
    """
    port: int = protocol.PORT
    """Port of the pod's agent."""
    round: int | None = None
    """Number of the torchrun rendezvous (round) for which the pod was created; None for `launcher: Agent`."""
    ending: bool = False
    """True if the operator has asked the node to stop the pod's containers and keep the pod (`EndPod`)."""
    template_hash: str = ""
    """Value of `JobView.template_hash` when the pod was created; empty if the pod has lost the annotation."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Resource requests of all containers of the pod, plus 1 of the resource `pods`; empty if unknown."""
    excluded: bool = False
    """True if the scheduler reports that no node would take the pod, even if no other pods ran there."""
    scheduling_group: str = ""
    """Name of the Kubernetes PodGroup that the API server stored for the pod; empty if it stored none."""
    image: str = ""
    """Image of the trainer container as the node resolved it; empty before the container has started.

    The value is usually repository@sha256:digest.
    """
    pod_set: str = ""
    """Pod set of the Kueue Workload whose quota the pod uses; empty if the pod uses no quota."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among the pods of the job: the pod of torchrun's store first, then by replica index and attempt."""
        return (-1 if self.index is None else self.index), self.attempt

    @property
    def unschedulable(self) -> bool:
        """True if the scheduler has found no node for the pod so far."""
        return self.waiting == UNSCHEDULABLE

    @property
    def ended(self) -> bool:
        """True if the trainer container has ended and will not be restarted."""
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)

    @property
    def released(self) -> bool:
        """True if all containers of the pod have ended, so that the pod holds no resources."""
        return self.ended and not self.lingers


class BlockedBy(enum.Enum):
    """Reasons why a waiting job can't start even if other jobs release resources. The values are shown to users."""

    EXCLUDED = "no node can run its pods, even if the node is empty"
    TOO_LARGE = "all nodes together can't run as many pods as it needs, even if the nodes are empty"
    BEYOND_QUOTA = "a quota of its namespace is too small for its pods"
    QUOTA = "a quota of its namespace is used up"
    """A resource quota of the job's namespace is used up. Other jobs of the same namespace can free it.

    No other reason here can disappear because other jobs delete their pods.
    """


@dataclass(frozen=True)
class QueuePlace:
    """Place of a job among the jobs that wait for resources.

    The default value means that the job does not wait, or that no other job waits.
    """

    ahead: tuple[str, str] | None = None
    """Namespace and name of the job that has its turn, if that is another job; None if no other job has."""
    turn: bool = False
    """True if this job has its turn.

    There are turns only if a waiting job occupies a part of the resources that it needs, or has deleted pods that did.
    """
    hindrance: BlockedBy | None = None
    """Reason why more resources would not help the job to start; None if they would help.

    In this case, other waiting jobs could use the resources that this job occupies.
    """
    fits: bool = False
    """True if the resources that all waiting jobs occupy together seem enough for this job.

    The value is set only for the job that has its turn.
    """


@dataclass(frozen=True)
class NodeView:
    name: str
    ready: bool
    out_of_service: bool = False
    notice: str = ""
    """Taint that announces the node's termination, as key or key=value; empty if there is none."""
    cordoned: bool = False
    fault: str = ""
    """Node condition that says that the node is faulty, with its message; empty if there is none."""
    fault_since: float = 0.0
    """Unix time since which the node has had the fault condition; 0 if the condition contains no time."""
    drilled_job: str = ""
    """Job, as namespace/name, for which a drill simulates a fault of this node; empty if there is none."""
    zone: str = ""
    """Zone of the node; empty if the node has no zone label."""
    allocatable: Mapping[str, Decimal] = field(default_factory=dict)
    """Allocatable amounts by resource, including `pods`; empty if the node does not list them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    spot: bool = False
    """True if the node's labels mark it as a spot node, which can be reclaimed at any time."""


@dataclass(frozen=True)
class Call:
    """One request to an agent. The request is in progress while it has neither a reply nor an error."""

    round: int
    claim: str
    sent_at: float | None
    """Unix time since which the operator has waited for the agent; None while the call is queued for a TLS handshake.

    Time in that queue is no evidence against the agent.
    """
    done_at: float | None = None
    reply: protocol.Prepared | protocol.Accepted | protocol.Refused | None = None
    error: str = ""
    durable: bool = False
    """For a Drain call: whether the agent must also write a checkpoint to storage."""
    request: str = ""
    """For a Save call: the id of the checkpoint request."""
    candidates: tuple[protocol.Candidate, ...] = ()
    """For a Prepare call: the candidates for the next round that the call lists."""

    @classmethod
    def of(
        cls,
        message: protocol.Prepare | protocol.Assign | protocol.Release | protocol.Drain | protocol.Save,
        sent_at: float,
    ) -> Call:
        """Return a Call object for a message that is being sent."""
        return cls(
            message.round,
            message.claim,
            sent_at,
            durable=isinstance(message, protocol.Drain) and message.durable,
            request=message.request if isinstance(message, protocol.Save) else "",
            candidates=message.candidates if isinstance(message, protocol.Prepare) else (),
        )

    def is_of(self, claim: Claim) -> bool:
        """Return whether the operator made the call for the given claim (its decision to begin a round)."""
        return (self.round, self.claim) == (claim.round, claim.claim_id)

    def waited_for(self, now: float) -> float:
        """Return the seconds for which the operator has waited for the agent's answer to this call."""
        return 0.0 if self.sent_at is None else now - self.sent_at

    @property
    def failed_at(self) -> float | None:
        """Unix time at which the call failed; None if it succeeded or is in progress."""
        return self.done_at if self.error else None

    def covers(self, new: Call) -> bool:
        """Return whether this call makes the call `new`, which is of the same kind, unnecessary.

        Both calls must have the same content, with one exception: while this call has no answer, the lists of
        candidates (replicas that may join the round) may differ.
        """
        is_same_request = (self.round, self.claim, self.request) == (new.round, new.claim, new.request)
        answered = self.done_at is not None and not self.error
        return is_same_request and self.durable >= new.durable and (not answered or self.candidates == new.candidates)


class ConnectionRefusal(enum.Enum):
    """Reasons for which a reachable host refuses to open a stream."""

    NOT_LISTENING = enum.auto()
    """No agent listens on the port."""
    OTHER_KEY = enum.auto()
    """An agent listens, but its certificate derives from a different master key than the operator's."""


@dataclass(frozen=True)
class AgentView:
    """State of this operator's connection to the agent of one replica.

    The data are lost when the operator restarts, and when a new pod gets the same name.
    """

    connected: bool = False
    """True if the agent's report stream is open and not silent."""
    wanted_at: float | None = None
    """Unix time since which the operator has tried to connect to the agent; None before the first attempt.

    The value is moved forward by the time for which attempts were queued in the operator.
    """
    lost_at: float | None = None
    """Unix time at which an open report stream last broke or fell silent; None if the stream is open or never was."""
    queued_at: float | None = None
    """Unix time since which the next attempt to open the report stream has been queued for a TLS handshake, or None.

    Time in this queue does not count as silence of the agent.
    """
    closed: bool = False
    """True if the agent's host closed the last open report stream.

    The value is False if that stream fell silent, or if there was no stream.
    """
    refusal: ConnectionRefusal | None = None
    """Reason for which the host refused the last attempt to open the report stream; None if it did not refuse.

    The value is also None if no host answered.
    """
    ready_at: float | None = None
    """Unix time at which this agent process first reported that it is ready; None until then."""
    report: protocol.Report | None = None
    """Last report of the agent, from the current report stream or an earlier one."""
    prepare: Call | None = None
    """Last Prepare call to the agent. The fields after it are the last calls of the other kinds."""
    assign: Call | None = None
    release: Call | None = None
    drain: Call | None = None
    save: Call | None = None

    @property
    def silent_since(self) -> float | None:
        """Unix time since which an agent that is not connected has been silent.

        This is the time at which its report stream broke. If no stream has been open yet, this is the time at which the
        operator first wanted a stream. The result is None if the operator never wanted a stream.
        """
        return self.wanted_at if self.lost_at is None else self.lost_at

    def silent_for(self, now: float) -> float | None:
        """Return the seconds for which the agent has not been connected. Delays that the operator causes do not count.

        The result is None if the operator never wanted a stream to the agent.
        """
        until = now if self.queued_at is None else self.queued_at
        return None if self.silent_since is None else until - self.silent_since

    def prepare_of(self, claim: Claim) -> Call | None:
        """Return the Prepare call for the given claim (decision to begin a round), or None if it was not sent.

        The message Prepare asks a replica to join the next round.
        """
        return self.prepare if self.prepare and self.prepare.is_of(claim) else None

    def release_of(self, claim: Claim) -> Call | None:
        """Return the Release call for the given claim (decision to begin a round), or None if it was not sent."""
        return self.release if self.release and self.release.is_of(claim) else None

    @property
    def alive(self) -> bool:
        """True if the agent answers in any way.

        An agent that refuses the operator's certificate counts as alive too. The cause is then the operator's master
        key (decision "Agents with another key count as alive").
        """
        return self.connected or self.refusal is ConnectionRefusal.OTHER_KEY


@dataclass(frozen=True)
class EvaluationJobView:
    """A Job of `spec.evaluationJob`, as the operator last saw it."""

    state: EvaluationJobState
    message: str = ""
    """Reason why the Job failed; empty if it did not fail."""


class Refusal(enum.Enum):
    """Reasons for which the API server refuses a pod, grouped by what must change before it accepts the pod."""

    QUOTA = enum.auto()
    """A resource quota must have free capacity for the pod."""
    TRANSIENT = enum.auto()
    """Nothing needs to change: there was a write conflict, or the API server is still starting."""
    PERMISSION = enum.auto()
    """The operator needs another permission.

    The API server may also not have loaded the operator's role or the TrainingJob kind yet.
    """
    MISSING = enum.auto()
    """An object to which the pod refers must be created, such as its service account or its priority class."""
    WEBHOOK = enum.auto()
    """An admission webhook must accept the pod, or respond at all."""
    PERMANENT = enum.auto()
    """The pod template or a policy of the cluster must change."""


@dataclass(frozen=True)
class CreateRefusal:
    """The API server's last refusal to create a pod of the job."""

    kind: Refusal
    message: str
    """Error message of the API server."""
    since: float
    """Unix time at which the current series of refusals began."""
    at: float


@dataclass(frozen=True)
class UriHolder:
    """A live job that uses a checkpoint folder, so that no other job may use it."""

    name: str
    """Name of the job, as namespace/name."""
    uid: str


@dataclass(frozen=True)
class JobObservation:
    job: JobView
    pods: tuple[PodView, ...]
    """Pods of this job (by owner uid), in the order of `PodView.order`."""
    nodes: Mapping[str, NodeView]
    agents: Mapping[str, AgentView]
    """State of this operator's connection to each agent, keyed by pod name."""
    fresh_claim: str
    """Random id that plan() uses as the id of a claim if it decides to begin a round."""
    seen_for: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which this operator has known each pod, by uid, measured with a monotonic clock."""
    started_again_for: Mapping[str, float] = field(default_factory=dict)
    """Seconds since this operator noticed a container restart, keyed by the uid of the restarted pod."""
    counted_for: float | None = None
    """Seconds since `status.goodput.at` by a monotonic clock; None if another operator process wrote that value."""
    secret_made: bool = True
    """True if the job's Secret exists, as far as this operator knows.

    The operator knows this once it has created the Secret, or once the API server has answered 409 (already exists).
    """
    refused: CreateRefusal | None = None
    """Last refused creation of a pod; None if there was none since a pod was created or the spec was changed."""
    taken: frozenset[str] = frozenset()
    """Pod names of this job that pods of another job already have, usually an earlier job with the same name."""
    nodes_watched: bool = True
    """True if this operator watches nodes. If it lacks the permission, the value is False and `nodes` is empty."""
    place: QueuePlace | None = QueuePlace()
    """Place among the jobs that wait for resources; None if the job has changed since the places were last computed."""
    uri_holder: UriHolder | None = None
    """The other job of this namespace that uses this job's checkpoint folder, or None."""
    uri_sharing: tuple[str, ...] = ()
    """Uids of the other live jobs of this namespace that may write to this job's checkpoint folder."""
    master_keys: tuple[str, ...] = ()
    """Ids of the operator's master keys, the key for new jobs first."""
    gang_apis: frozenset[GangApi] | None = frozenset()
    """APIs of gang scheduling that the API server serves; None if that is not known yet."""
    pod_group: PodGroup | None = None
    """Pod group of the job as this operator last wrote it; None if it has written none or has deleted it."""
    pod_group_deleted: bool = False
    """True if this operator has deleted the pod group and has not written a new one."""
    template_outdated: str = ""
    """Sentence on pod fields that the API server supports but `spec.template` of the CRD lacks; or empty.
    """
    operator_isolated: bool = False
    """True if the agents of most jobs fell silent at the same time.

    The operator's own network may then be the cause. Only jobs that have trained count.
    """
    given_up: frozenset[str] = frozenset()
    """Uids of pods that count as dead because they are silent (`Plan.silent`)."""
    progress_every: float = 2.0
    """Shortest time in seconds between two status writes that only update progress.

    It grows with the number of jobs.
    """
    quota: QuotaView | None = None
    """Kueue queue of the job and its Workloads; None if the job uses no queue."""
    evaluation_jobs: Mapping[str, EvaluationJobView] | None = None
    """Jobs of `spec.evaluationJob` by name; None if the operator has not listed them yet."""
    words_every: float = 2.0
    """Shortest time in seconds between two status writes that only change what a job without a round waits for.

    The time grows with the number of jobs.
    """

    def agent(self, replica: str) -> AgentView:
        return self.agents.get(replica, UNKNOWN_AGENT)

    def node(self, pod: PodView) -> NodeView:
        return self.nodes.get(pod.node, UNKNOWN_NODE)


UNKNOWN_AGENT = AgentView()
UNKNOWN_NODE = NodeView(name="", ready=True)
"""Substitute for a node about which nothing is known. It counts as ready."""
