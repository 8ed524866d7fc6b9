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


@dataclass(frozen=True)
class JobView:
    name: str
    namespace: str
    uid: str
    generation: int
    created: float
    """Unix seconds, as all times here."""
    deleting: bool
    spec: JobSpec | None
    """None where the manifest is wrong; then `spec_error` says how."""
    spec_error: str
    status: JobStatus
    ignored: tuple[str, ...] = ()
    """Paths of fields of its spec that this version does not know; `spec` is what remains."""
    checkpoint_request: str = ""
    """The annotation by which a person asks for a checkpoint now."""
    template_hash: str = ""
    """Of what its spec says of pods; empty where not all of that is known."""
    finalizers: tuple[str, ...] = ()
    """What keeps it after its deletion, until each is removed."""


class PodPhase(enum.StrEnum):
    """As Kubernetes has it; but a pod that lingers has ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


UNSCHEDULABLE = "Unschedulable"
"""The scheduler's word, of `PodView.waiting`."""


@dataclass(frozen=True)
class PodView:
    name: str
    uid: str
    index: int | None
    """Of the replica; None for the pod that serves torchrun's store."""
    attempt: int
    created: float
    phase: PodPhase
    deleting: bool
    node: str = ""
    ip: str = ""
    waiting: str = ""
    """Why it does not run yet: Unschedulable, ErrImagePull, ImagePullBackOff, CrashLoopBackOff and so on."""
    waiting_message: str = ""
    awaited_scheduler: str = ""
    """The name of the scheduler that has not looked at it yet; empty once one has."""
    avoids: tuple[str, ...] = ()
    """Nodes that it must not run on, by a rule of ours."""
    exit_code: int | None = None
    exit_reason: str = ""
    """Of the trainer container, once it has ended: Error, OOMKilled, Evicted ..."""
    exit_message: str = ""
    restarts: int = 0
    """How often the trainer container was started again in this pod, and how it had ended before."""
    last_exit_code: int | None = None
    last_exit_reason: str = ""
    priority: int = 0
    """As admission resolved its priority class."""
    grace: float = 30.0
    """Seconds from its deletion to SIGKILL: of the deletion under way, or as its spec says."""
    deletion_at: float | None = None
    """When the grace of the deletion under way is over."""
    disruption: str = ""
    """The reason of its condition DisruptionTarget: EvictionByEvictionAPI, PreemptionByScheduler and so on."""
    lingers: bool = False
    """Its trainer has ended (which `phase` says), but other containers run on: it holds its resources until deleted."""
    port: int = protocol.PORT
    """Where its agent listens."""
    round: int | None = None
    """The rendezvous that it was made for, with `launcher: Torchrun`."""
    ending: bool = False
    """Its node was told to end it and to let it be (EndPod)."""
    template_hash: str = ""
    """Its job's, when it was made; empty where its annotation is gone."""
    requests: Mapping[str, Decimal] = field(default_factory=dict)
    """Of its containers by resource, and 1 of `pods`; empty where that is not known."""
    excluded: bool = False
    """The scheduler says that no node would take it, even if nothing else ran there."""
    image: str = ""
    """Of its trainer container, as its node resolved it: mostly repository@sha256:digest. Empty before it has begun."""

    @property
    def order(self) -> tuple[int, int]:
        """Among the pods of its job: by replica and attempt, the store's before all."""
        return (-1 if self.index is None else self.index), self.attempt

    @property
    def unschedulable(self) -> bool:
        """The scheduler has found no node for it so far."""
        return self.waiting == UNSCHEDULABLE

    @property
    def ended(self) -> bool:
        """Its trainer has ended, for good."""
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)

    @property
    def released(self) -> bool:
        """It has ended with all its containers, and holds no resources."""
        return self.ended and not self.lingers


class BlockedBy(enum.Enum):
    """What keeps a job that waits for room from starting though others made room, in words."""

    EXCLUDED = "no node would take its pods, even if nothing else ran there"
    TOO_LARGE = "all nodes together could not hold as many of its pods as it needs, even if nothing else ran there"
    BEYOND_QUOTA = "a quota of its namespace is too small for as many of its pods as it needs"
    QUOTA = "a quota of its namespace is used up"
    """Jobs of its own namespace could make room in that."""


@dataclass(frozen=True)
class QueuePlace:
    """The place of a job among those that wait for room. The default: it waits alone, or not at all."""

    ahead: tuple[str, str] | None = None
    """Namespace and name of the job whose turn it is, where that is another one."""
    turn: bool = False
    """It is its turn. There are none while no waiting job holds a part of what it needs, or has released one."""
    hindrance: BlockedBy | None = None
    """Why it can't start with the room that it holds and other waiting jobs could use."""
    fits: bool = False
    """The room that the waiting jobs hold together seems to be enough for it; said of the job whose turn it is."""


@dataclass(frozen=True)
class NodeView:
    name: str
    ready: bool
    out_of_service: bool = False
    notice: str = ""
    """The taint that announces the node's end, as key or key=value."""
    cordoned: bool = False
    zone: str = ""
    """Empty where its label does not say."""
    allocatable: Mapping[str, Decimal] = field(default_factory=dict)
    """By resource, `pods` among them; empty where it does not say."""
    labels: Mapping[str, str] = field(default_factory=dict)
    spot: bool = False
    """Its labels say that it may be taken away at any time, and costs less."""


@dataclass(frozen=True)
class Call:
    """One request to an agent. Neither reply nor error: under way."""

    round: int
    claim: str
    sent_at: float | None
    """Since when its agent is waited for; None while it waits for its turn to shake hands, which speaks against no
    agent."""
    done_at: float | None = None
    reply: protocol.Prepared | protocol.Accepted | protocol.Refused | None = None
    error: str = ""
    durable: bool = False
    """Of a Drain: it asked for a checkpoint in storage."""
    request: str = ""
    """Of a Save."""
    candidates: tuple[protocol.Candidate, ...] = ()
    """Of a Prepare: who it named."""

    @classmethod
    def of(cls, message: protocol.Prepare | protocol.Assign | protocol.Drain | protocol.Save, sent_at: float) -> Call:
        """Under way."""
        return cls(
            message.round,
            message.claim,
            sent_at,
            durable=isinstance(message, protocol.Drain) and message.durable,
            request=message.request if isinstance(message, protocol.Save) else "",
            candidates=message.candidates if isinstance(message, protocol.Prepare) else (),
        )

    def waited_for(self, now: float) -> float:
        """Seconds."""
        return 0.0 if self.sent_at is None else now - self.sent_at

    @property
    def failed_at(self) -> float | None:
        """None where it did not fail, or not yet."""
        return self.done_at if self.error else None

    def covers(self, new: Call) -> bool:
        """Whether the new one of its kind would ask the same; once it was answered, of the same candidates."""
        same = (self.round, self.claim, self.request) == (new.round, new.claim, new.request)
        answered = self.done_at is not None and not self.error
        return same and self.durable >= new.durable and (not answered or self.candidates == new.candidates)


class ConnectionRefusal(enum.Enum):
    """What a host that is there makes of an attempt to open a stream."""

    NOT_LISTENING = enum.auto()
    """No agent listens."""
    OTHER_KEY = enum.auto()
    """An agent does, and its certificates come from another master key than this operator's."""


@dataclass(frozen=True)
class AgentView:
    """What is known from talking to one replica's agent. Forgotten when the operator restarts, and when the pod of that
    name has another uid than before."""

    connected: bool = False
    """The watch stream is open and not silent."""
    wanted_at: float | None = None
    """When this operator first began a handshake for the stream, or failed before, later by the time for which it was
    queued since; None before that, and where no stream is wanted."""
    lost_at: float | None = None
    """When an open stream last broke or fell silent; None if it never did, or is open again."""
    queued_at: float | None = None
    """Since when the next attempt to open the stream waits for its turn to shake hands: the silence lasts no longer for
    that. None where it does not."""
    closed: bool = False
    """Whether the other end closed the stream that was open last; else it fell silent, or none was."""
    refusal: ConnectionRefusal | None = None
    """How the last attempt to open the stream was turned away; None where it was not, or where nobody answered."""
    ready_at: float | None = None
    """When a report of this agent instance first said ready; None until then."""
    report: protocol.Report | None = None
    """The last one, of this stream or an earlier one."""
    prepare: Call | None = None
    """The latest of each kind."""
    assign: Call | None = None
    drain: Call | None = None
    save: Call | None = None

    @property
    def silent_since(self) -> float | None:
        """Of one that is not connected: when its stream broke or, where none was open so far, was first wanted."""
        return self.wanted_at if self.lost_at is None else self.lost_at

    def silent_for(self, now: float) -> float | None:
        """Seconds in which it might have been heard; None of one that was never wanted."""
        until = now if self.queued_at is None else self.queued_at
        return None if self.silent_since is None else until - self.silent_since

    def prepare_of(self, claim: Claim) -> Call | None:
        """The Prepare of that claim, where it was asked."""
        call = self.prepare
        return call if call and (call.round, call.claim) == (claim.round, claim.claim_id) else None

    @property
    def alive(self) -> bool:
        """Whether it answers, if only to say that it knows another operator: then the silence is ours (decision "Who
        knows another key is alive")."""
        return self.connected or self.refusal is ConnectionRefusal.OTHER_KEY


class Refusal(enum.Enum):
    """What must come first before the API server takes a pod that it refused."""

    QUOTA = enum.auto()
    """Room in a quota."""
    TRANSIENT = enum.auto()
    """Nothing: another write was in the way, or the API server still starts."""
    PERMISSION = enum.auto()
    """The operator's own role: for a moment after its start the API server may not know it."""
    MISSING = enum.auto()
    """An object that the pod names: its service account, its priority class."""
    WEBHOOK = enum.auto()
    """An admission webhook that answers: one that is broken says neither yes nor no."""
    PERMANENT = enum.auto()
    """Another template, or another policy of the cluster."""


@dataclass(frozen=True)
class CreateRefusal:
    """The last create of a job that the API server refused."""

    kind: Refusal
    message: str
    """The API server's sentence."""
    since: float
    """When creates began to be refused so, one after the other."""
    at: float


@dataclass(frozen=True)
class UriHolder:
    """A live job that has a folder of checkpoints."""

    name: str
    """namespace/name"""
    uid: str


@dataclass(frozen=True)
class JobObservation:
    job: JobView
    pods: tuple[PodView, ...]
    """Owned by this job (by owner uid), in their `order`."""
    nodes: Mapping[str, NodeView]
    agents: Mapping[str, AgentView]
    """By pod name."""
    fresh_claim: str
    """A random id, for the case that the plan makes a claim."""
    seen_for: Mapping[str, float] = field(default_factory=dict)
    """For how many seconds this operator has known each pod, by uid, whatever clocks say meanwhile."""
    started_again_for: Mapping[str, float] = field(default_factory=dict)
    """And has known that its container was started again, where it was since."""
    counted_for: float | None = None
    """Seconds since `status.goodput.at` by a clock that nobody sets; None where another operator made that count."""
    secret_made: bool = True
    """False until this operator has seen the job's Secret created (a 409 counts)."""
    refused: CreateRefusal | None = None
    """None once a pod was created, or where the spec has changed since."""
    taken: frozenset[str] = frozenset()
    """Names of pods as this job would name its own that are another's: of the job that had its name before, mostly."""
    nodes_watched: bool = True
    """False: `nodes` is empty for good, as this operator may not look at them."""
    place: QueuePlace | None = QueuePlace()
    """Among the jobs that wait for room. None: the job itself has changed since that was worked out."""
    uri_holder: UriHolder | None = None
    """The other job of this namespace that has this job's folder of checkpoints."""
    uri_sharing: tuple[str, ...] = ()
    """Uids of the other live jobs of this namespace that may write to that folder."""
    master_keys: tuple[str, ...] = ()
    """Ids of the operator's master keys, that for new jobs first."""
    template_outdated: str = ""
    """Sentence about fields of pods that the API server knows and `spec.template` lacks (`spec.template_outdated`)."""
    operator_isolated: bool = False
    """Most jobs that have trained have fallen silent together: it may be this operator that does not hear them."""
    given_up: frozenset[str] = frozenset()
    """Uids of pods whose silence may be taken for death (`Plan.silent`)."""
    progress_every: float = 2.0
    """Seconds between status writes that bring nothing but progress: stretched by the shell as jobs get many."""
    words_every: float = 2.0
    """The same of a job without a round: they only say in other words why it waits."""

    def agent(self, replica: str) -> AgentView:
        return self.agents.get(replica, UNKNOWN_AGENT)

    def node(self, pod: PodView) -> NodeView:
        return self.nodes.get(pod.node, UNKNOWN_NODE)


UNKNOWN_AGENT = AgentView()
UNKNOWN_NODE = NodeView(name="", ready=True)
"""Nothing speaks against it."""
