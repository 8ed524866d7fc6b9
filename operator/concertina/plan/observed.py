"""The input of plan(): `JobObservation` is one consistent look at one job. Data only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import concertina_protocol as protocol
from concertina.api.spec import JobSpec
from concertina.api.status import JobStatus
from concertina.api.world import Claim
from concertina.plan.kueue import QuotaView


class GangApi(enum.StrEnum):
    """APIs of gang scheduling, as group/version, that an API server may serve."""

    POD_GROUP = "scheduling.k8s.io/v1beta1"
    """PodGroup of Kubernetes 1.37 or later."""
    POD_GROUP_ALPHA = "scheduling.k8s.io/v1alpha2"
    """PodGroup of Kubernetes 1.36, whose minimum is immutable."""
    VOLCANO = "scheduling.volcano.sh/v1beta1"
    COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
    KAI = "scheduling.run.ai/v2alpha2"
    """PodGroup of KAI, which KAI itself writes."""
    KARTA = "run.ai/v1alpha1"
    """Description of a kind of jobs, by which KAI learns the minimum of ours."""


@dataclass(frozen=True)
class PodGroup:
    """Pod group of a job, as one of the APIs has it."""

    api: GangApi
    name: str
    """Name of the object, or empty where the scheduler makes it (KAI)."""
    min_count: int
    """Number of pods that get their nodes together."""
    queue: str = ""
    topology: str = ""
    """Label of the nodes whose value all pods of the group must share; empty for none."""


@dataclass(frozen=True)
class JobView:
    name: str
    namespace: str
    uid: str
    generation: int
    created: float
    """Creation time in Unix seconds, as all times here."""
    deleting: bool
    spec: JobSpec | None
    """Spec of the job; None if the manifest is invalid, and then `spec_error` says why."""
    spec_error: str
    status: JobStatus
    ignored: tuple[str, ...] = ()
    """Paths of fields of the spec that this version does not know; `spec` is what remains without them."""
    claims_error: str = ""
    """Why the GPUs of the template's claims, and with them the number of workers, are not known; empty if they are."""
    checkpoint_request: str = ""
    """Value of the annotation by which a person asks for a checkpoint now."""
    template_hash: str = ""
    """Hash of the pod-related part of the spec; empty if this version does not know all of that part."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that keep the job after its deletion, until each is removed."""
    queue: str = ""
    """LocalQueue of Kueue that the job's label names; empty without the label."""
    priority_class: str = ""
    """WorkloadPriorityClass of Kueue that the job's label names."""
    prebuilt_workload: str = ""
    """Workload that the job's label names to be used instead of one that the operator makes."""
    request_hash: str = ""
    """Hash of the pod sets that the job asks a queue for, without their counts; empty without a readable spec."""


class PodPhase(enum.StrEnum):
    """Phase of a pod as in Kubernetes, except that a pod that lingers has ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


UNSCHEDULABLE = "Unschedulable"
"""The scheduler's reason, as in `PodView.waiting`."""


@dataclass(frozen=True)
class PodView:
    name: str
    uid: str
    index: int | None
    """Index of the replica; None for the pod that serves torchrun's store."""
    attempt: int
    created: float
    phase: PodPhase
    deleting: bool
    node: str = ""
    ip: str = ""
    waiting: str = ""
    """Reason why the pod does not run yet: Unschedulable, ErrImagePull, ImagePullBackOff, CrashLoopBackOff etc."""
    waiting_message: str = ""
    awaited_scheduler: str = ""
    """Name of the scheduler that has not looked at the pod yet; empty once one has."""
    avoids: tuple[str, ...] = ()
    """Nodes that the pod must not run on, by a rule that this operator set."""
    exit_code: int | None = None
    exit_reason: str = ""
    """Exit reason of the trainer container, once it has ended: Error, OOMKilled, Evicted and so on."""
    exit_message: str = ""
    restarts: int = 0
    """Number of restarts of the trainer container in this pod. The next two fields describe how it last ended."""
    last_exit_code: int | None = None
    last_exit_reason: str = ""
    priority: int = 0
    """Priority as admission resolved it from the priority class."""
    grace: float = 30.0
    """Seconds from the deletion of the pod to SIGKILL: of the deletion under way, or else as in the pod's spec."""
    deletion_at: float | None = None
    """When the grace period of the deletion under way ends."""
    disruption: str = ""
    """Reason of the condition DisruptionTarget: EvictionByEvictionAPI, PreemptionByScheduler and so on."""
    lingers: bool = False
    """Whether the trainer has ended (as `phase` says) while other containers run: the pod holds its resources until
    deleted."""
    port: int = protocol.PORT
    """Port of the pod's agent."""
    round: int | None = None
    """Round of the rendezvous that the pod was created for, with `launcher: Torchrun`."""
    ending: bool = False
    """Whether the pod's node was told to end the pod and to leave it there (EndPod)."""
    template_hash: str = ""
    """Template hash of the job when the pod was created; empty if the annotation is gone."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Requests of the pod's containers by resource, and 1 of `pods`; empty if unknown."""
    excluded: bool = False
    """Whether the scheduler says that no node would take the pod, even if nothing else ran there."""
    scheduling_group: str = ""
    """Name of the PodGroup of Kubernetes that the API server stored for the pod; empty without one."""
    image: str = ""
    """Image of the trainer container as the node resolved it, usually repository@sha256:digest; empty before it has
    started."""
    pod_set: str = ""
    """Pod set of a Workload of Kueue whose quota the pod uses; empty if it uses none."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among the pods of the job: replica index, then attempt; the pod of the store comes first."""
        return (-1 if self.index is None else self.index), self.attempt

    @property
    def unschedulable(self) -> bool:
        """Whether the scheduler has found no node for the pod so far."""
        return self.waiting == UNSCHEDULABLE

    @property
    def ended(self) -> bool:
        """Whether the trainer has ended, for good."""
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)

    @property
    def released(self) -> bool:
        """Whether the pod has ended with all its containers, and holds no resources."""
        return self.ended and not self.lingers


class BlockedBy(enum.Enum):
    """Reasons why a waiting job can't start even though others made room, in words."""

    EXCLUDED = "no node would take its pods, even if nothing else ran there"
    TOO_LARGE = "all nodes together could not hold as many of its pods as it needs, even if nothing else ran there"
    BEYOND_QUOTA = "a quota of its namespace is too small for as many of its pods as it needs"
    QUOTA = "a quota of its namespace is used up"
    """Jobs of the same namespace can remove this reason by making room, unlike the other reasons."""


@dataclass(frozen=True)
class QueuePlace:
    """Place of a job among those that wait for room. The default: it waits alone, or not at all."""

    ahead: tuple[str, str] | None = None
    """Namespace and name of the job whose turn it is, if that is another job."""
    turn: bool = False
    """Whether it is this job's turn.

    There are no turns while no waiting job holds a part of what it needs, or has released one.
    """
    hindrance: BlockedBy | None = None
    """Reason why the job can't start with the room that it holds and that other waiting jobs could use."""
    fits: bool = False
    """Whether the room that the waiting jobs hold together seems enough for this job; set only for the job whose turn
    it is."""


@dataclass(frozen=True)
class NodeView:
    name: str
    ready: bool
    out_of_service: bool = False
    notice: str = ""
    """Taint that announces the node's end, as key or key=value."""
    cordoned: bool = False
    zone: str = ""
    """Zone of the node; empty if its label does not say."""
    allocatable: Mapping[str, Decimal] = field(default_factory=dict)
    """Allocatable amounts by resource, including `pods`; empty if the node does not say."""
    labels: Mapping[str, str] = field(default_factory=dict)
    spot: bool = False
    """Whether the node's labels say that it can be reclaimed at any time, and costs less."""


@dataclass(frozen=True)
class Call:
    """One request to an agent. It is under way while it has neither a reply nor an error."""

    round: int
    claim: str
    sent_at: float | None
    """When waiting for the agent began; None while the call waits for its turn to shake hands, which is no evidence
    against the agent."""
    done_at: float | None = None
    reply: protocol.Prepared | protocol.Accepted | protocol.Refused | None = None
    error: str = ""
    durable: bool = False
    """For a Drain: whether it asked for a checkpoint in storage."""
    request: str = ""
    """For a Save: the id of the request."""
    candidates: tuple[protocol.Candidate, ...] = ()
    """For a Prepare: the candidates that it named."""

    @classmethod
    def of(
        cls,
        message: protocol.Prepare | protocol.Assign | protocol.Release | protocol.Drain | protocol.Save,
        sent_at: float,
    ) -> Call:
        """Return the call for a message that is under way."""
        return cls(
            message.round,
            message.claim,
            sent_at,
            durable=isinstance(message, protocol.Drain) and message.durable,
            request=message.request if isinstance(message, protocol.Save) else "",
            candidates=message.candidates if isinstance(message, protocol.Prepare) else (),
        )

    def is_of(self, claim: Claim) -> bool:
        """Return whether the call was made under that claim."""
        return (self.round, self.claim) == (claim.round, claim.claim_id)

    def waited_for(self, now: float) -> float:
        """Return for how many seconds the agent has been waited for."""
        return 0.0 if self.sent_at is None else now - self.sent_at

    @property
    def failed_at(self) -> float | None:
        """When the call failed; None if it did not fail, or not yet."""
        return self.done_at if self.error else None

    def covers(self, new: Call) -> bool:
        """Return whether a new call of the same kind would ask the same.

        Once this call is answered, the new one must also name the same candidates.
        """
        is_same_request = (self.round, self.claim, self.request) == (new.round, new.claim, new.request)
        answered = self.done_at is not None and not self.error
        return is_same_request and self.durable >= new.durable and (not answered or self.candidates == new.candidates)


class ConnectionRefusal(enum.Enum):
    """Response of a reachable host that turns away an attempt to open a stream."""

    NOT_LISTENING = enum.auto()
    """No agent listens."""
    OTHER_KEY = enum.auto()
    """An agent listens, but its certificates come from another master key than this operator's."""


@dataclass(frozen=True)
class AgentView:
    """Knowledge from the contact with one replica's agent.

    This knowledge is lost when the operator restarts, and when the pod of that name has another uid than before.
    """

    connected: bool = False
    """Whether the watch stream is open and not silent."""
    wanted_at: float | None = None
    """Start of the period in which the agent could have been connected: the first handshake for the stream (or the
    first failure before a handshake), plus the time for which attempts have been queued since. None before that, and if
    no stream is wanted."""
    lost_at: float | None = None
    """When an open stream last broke or fell silent; None if it never did, or is open again."""
    queued_at: float | None = None
    """Since when the next attempt to open the stream waits for its turn to shake hands, or None. The time in this queue
    does not count as silence."""
    closed: bool = False
    """Whether the other end closed the stream that was open last. Otherwise it fell silent, or there was none."""
    refusal: ConnectionRefusal | None = None
    """Outcome if the last attempt to open the stream was turned away; None if it was not, or if no host answered."""
    ready_at: float | None = None
    """When a report of this agent instance first said ready; None until then."""
    report: protocol.Report | None = None
    """Last report, from this stream or an earlier one."""
    prepare: Call | None = None
    """Latest Prepare. The next fields hold the latest call of each other kind."""
    assign: Call | None = None
    release: Call | None = None
    drain: Call | None = None
    save: Call | None = None

    @property
    def silent_since(self) -> float | None:
        """When an agent that is not connected fell silent.

        This is when its stream broke or, if none was open so far, when a stream was first wanted.
        """
        return self.wanted_at if self.lost_at is None else self.lost_at

    def silent_for(self, now: float) -> float | None:
        """Return the seconds in which the agent could have been connected and was not.

        None if no stream was ever wanted.
        """
        until = now if self.queued_at is None else self.queued_at
        return None if self.silent_since is None else until - self.silent_since

    def prepare_of(self, claim: Claim) -> Call | None:
        """Return the Prepare of that claim, or None if it was not sent."""
        return self.prepare if self.prepare and self.prepare.is_of(claim) else None

    def release_of(self, claim: Claim) -> Call | None:
        """Return the Release of that claim, or None if it was not sent."""
        return self.release if self.release and self.release.is_of(claim) else None

    @property
    def alive(self) -> bool:
        """Whether the agent answers, if only to say that it knows another operator.

        In that case the silence is on the operator's side (decision "Agents with another key count as alive").
        """
        return self.connected or self.refusal is ConnectionRefusal.OTHER_KEY


class Refusal(enum.Enum):
    """Condition under which the API server accepts a pod that it refused."""

    QUOTA = enum.auto()
    """Room in a quota must become free."""
    TRANSIENT = enum.auto()
    """Nothing: another write was in the way, or the API server is still starting."""
    PERMISSION = enum.auto()
    """The API server must learn of the operator's role, or of the kind TrainingJob, which it may not know at first."""
    MISSING = enum.auto()
    """An object that the pod names must be created, for example its service account or its priority class."""
    WEBHOOK = enum.auto()
    """An admission webhook that answers must allow the pod; a broken webhook says neither yes nor no."""
    PERMANENT = enum.auto()
    """The template, or a policy of the cluster, must change."""


@dataclass(frozen=True)
class CreateRefusal:
    """Last create of a job that the API server refused."""

    kind: Refusal
    message: str
    """Error message of the API server."""
    since: float
    """When the current series of refused creates began."""
    at: float


@dataclass(frozen=True)
class UriHolder:
    """A live job that has a folder of checkpoints."""

    name: str
    """Name of the job, as namespace/name."""
    uid: str


@dataclass(frozen=True)
class JobObservation:
    job: JobView
    pods: tuple[PodView, ...]
    """Pods owned by this job (by owner uid), in their `order`."""
    nodes: Mapping[str, NodeView]
    agents: Mapping[str, AgentView]
    """Views of agents by pod name."""
    fresh_claim: str
    """A random id, in case the plan makes a claim."""
    seen_for: Mapping[str, float] = field(default_factory=dict)
    """Seconds, by this operator's monotonic clock, for which it has known each pod, by uid."""
    started_again_for: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which this operator has known that a pod's container was restarted, by uid of the pods that had a
    restart."""
    counted_for: float | None = None
    """Seconds since `status.goodput.at` by a monotonic clock; None if another operator made that count."""
    secret_made: bool = True
    """Whether the job's Secret exists. False until this operator has seen it created (a 409 counts)."""
    refused: CreateRefusal | None = None
    """Last refused create; None once a pod was created, or if the spec has changed since."""
    taken: frozenset[str] = frozenset()
    """Names that this job would give its pods but that belong to another job's pods, usually those of an earlier job
    with the same name."""
    nodes_watched: bool = True
    """Whether this operator watches nodes. If False, `nodes` is always empty: the operator may not read nodes."""
    place: QueuePlace | None = QueuePlace()
    """Place among the jobs that wait for room; None if the job has changed since the places were computed."""
    uri_holder: UriHolder | None = None
    """Other job of this namespace that has this job's folder of checkpoints."""
    uri_sharing: tuple[str, ...] = ()
    """Uids of the other live jobs of this namespace that may write to that folder."""
    master_keys: tuple[str, ...] = ()
    """Ids of the operator's master keys, with the key for new jobs first."""
    gang_apis: frozenset[GangApi] | None = frozenset()
    """APIs of gang scheduling that the API server serves; None until that is known."""
    pod_group: PodGroup | None = None
    """Pod group of the job as this operator last wrote it; None if it has not written any, or has deleted it."""
    pod_group_deleted: bool = False
    """Whether this operator has deleted the pod group and not written any since."""
    template_outdated: str = ""
    """Sentence about fields of pods that the API server knows and `spec.template` lacks (`spec.template_outdated`)."""
    operator_isolated: bool = False
    """Whether most jobs that have trained fell silent together, so that this operator itself may be cut off."""
    given_up: frozenset[str] = frozenset()
    """Uids of pods whose silence counts as death (`Plan.silent`)."""
    progress_every: float = 2.0
    """Seconds between status writes that only update progress. The shell increases the interval with the number of
    jobs."""
    quota: QuotaView | None = None
    """Queue of Kueue that lends the job its pods; None if it has none."""
    words_every: float = 2.0
    """Seconds between status writes that only reword why a job without a round waits. The shell increases this interval
    likewise."""

    def agent(self, replica: str) -> AgentView:
        return self.agents.get(replica, UNKNOWN_AGENT)

    def node(self, pod: PodView) -> NodeView:
        return self.nodes.get(pod.node, UNKNOWN_NODE)


UNKNOWN_AGENT = AgentView()
UNKNOWN_NODE = NodeView(name="", ready=True)
"""The default node: nothing speaks against it."""
