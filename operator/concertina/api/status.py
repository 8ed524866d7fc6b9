"""status of a TrainingJob, and its times: RFC 3339 strings in manifests, Unix seconds in Python."""

from __future__ import annotations

import datetime
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from concertina.api.accounting import (
    MOST_INCIDENTS,
    Cost,
    Count,
    Goodput,
    Incident,
    Name,
    RoundWaits,
    Seconds,
    Timestamp,
)
from concertina.api.history import MOST_CHARACTERS as MOST_OF_HISTORY
from concertina.api.model import Observed
from concertina.api.packed import MOST_CHARACTERS, pack, unpack

Packed = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class Distance(enum.StrEnum):
    """Between a member and the copies of its snapshots."""

    ZONE = "Zone"
    NODE = "Node"
    SAME_NODE = "SameNode"
    NONE = "None"
    """There is one member."""
    NO_SNAPSHOTS = ""
    """As operators have written it from the beginning; what the CRD refused they could not write any more."""


class RequestState(enum.StrEnum):
    PENDING = "Pending"
    DONE = "Done"
    REFUSED = "Refused"


class ConditionType(enum.StrEnum):
    """The conditions that operators of this version write; a status may have others."""

    READY = "Ready"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    STALLED = "Stalled"
    RECONCILE_ERROR = "ReconcileError"
    """A pass over the job raised: until the next one that does not."""


ENDED = (ConditionType.COMPLETE, ConditionType.FAILED)
"""Where one of them is true, the job has ended, for good."""


def rfc3339(seconds: float) -> str:
    """Unix seconds as Kubernetes writes times, to the microsecond where there is a fraction."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="microseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def unix_seconds(timestamp: str) -> float:
    """The reverse of `rfc3339`."""
    return datetime.datetime.fromisoformat(timestamp).timestamp()


class Claim(Observed):
    """The highest round that the operator has claimed; written before anything of an older round is stopped."""

    round: Count = Field(description="Number of the claimed round; only ever grows.")
    claim_id: Name = Field(description="Which claim of this round it is: two operators never share one.")
    committed: bool = Field(default=False, description="Whether members were committed under it: that is done once.")
    at: Timestamp | None = Field(default=None, description="When it was made.")
    reason: Annotated[str, Field(max_length=128)] = Field(default="", description="Why, in one word.")
    message: Annotated[str, Field(max_length=4096)] = Field(default="", description="Why, in a sentence.")
    from_storage: bool = Field(
        default=False, description="A whole restart: the round starts from durable storage, not from node memory."
    )


class Member(Observed):
    """A replica that is part of the current round."""

    replica: Name = Field(description="Name of its pod.")
    uid: Name = Field(description="The pod's uid.")
    instance: Name = Field(description="The agent's instance id, another one after each start of its container.")
    node: Name = Field(default="", description="The pod's node. Empty in a world that is too large to list.")
    workers: Count = Field(description="Training processes in it.")

    def is_pod(self, uid: str) -> bool:
        """Whether that is its pod's uid, of which a large world keeps the beginning."""
        return _stands_for(self.uid, uid)

    def is_agent(self, instance: str) -> bool:
        """Whether that is its agent's instance id, of which a large world keeps the beginning."""
        return _stands_for(self.instance, instance)


BEGINNING, CUT = 8, "~"
"""Of random ids, in a large world: 32 bits tell the pod or agent of a name from the next one of that name."""


def shortened(id: str) -> str:
    """Its beginning, which says that it is one."""
    return id if len(id) <= BEGINNING or id.endswith(CUT) else id[:BEGINNING] + CUT


def _stands_for(kept: str, id: str) -> bool:
    return kept == id or (kept.endswith(CUT) and id.startswith(kept[:-1]))


class Base(Observed):
    """Where the current round started from: snapshots of lower rounds beyond `step` are void."""

    round: Count = Field(description="The round that was started from this step.")
    step: Count = Field(description="Steps finished when the round started.")
    source: Annotated[str, Field(max_length=16)] = Field(
        default="", description="Where that state came from: Fresh (there was none), Memory or Storage."
    )


class World(Observed):
    """The current round and who is in it."""

    round: Count = Field(default=0, description="Number of the round that was last committed; 0 before the first.")
    claim: Claim | None = Field(default=None, description="The highest round claimed.")
    size: Annotated[str, Field(max_length=32)] = Field(
        default="", description="Members of the current round and replicas wanted, as 6/8."
    )
    replicas: Count = Field(default=0, description="Members of the current round.")
    workers: Count = Field(default=0, description="Training processes of the current round.")
    lead: Name | None = Field(default=None, description="The member whose agent leads the round (it has rank 0).")
    members: tuple[Member, ...] = Field(
        default=(),
        max_length=10000,
        description="In order of rank. Empty with more than 64: `concertina status --members` lists them.",
    )
    layout: Annotated[str, Field(max_length=256)] | None = Field(
        default=None,
        description="How the ranks of the current round are shared out, outermost first, as replicate 2 x shard 4 x "
        "tensor 2. Absent: spec.parallelism says nothing.",
    )
    crossing: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Which tensor and context groups are not within one domain of spec.topology, and over which link "
        "they go. Absent: none.",
    )
    copies: Distance = Field(
        default=Distance.NO_SNAPSHOTS,
        description="Where each member's snapshots are copied to: a member in another zone, on another node, for some "
        "on the same node, or none (there is one member). Empty: a command of its own has no snapshots.",
    )
    base: Base | None = Field(default=None, description="Where the current round started from.")
    since: Timestamp | None = Field(default=None, description="When the current round was committed.")

    @property
    def latest_round(self) -> int:
        """The round that is being made, else the last one; 0 before the first. (A claim that no round follows is
        committed as it is made.)"""
        return self.claim.round if self.claim and not self.claim.committed else self.round

    def ranks_of(self, replica: str) -> range:
        """Of its workers; an empty one where it is no member."""
        first = 0
        for member in self.members:
            if member.replica == replica:
                return range(first, first + member.workers)
            first += member.workers
        return range(0)

    def replica_of(self, rank: int) -> str:
        """Whose worker that is; nothing where there is no such rank."""
        first = 0
        for member in self.members:
            if first <= rank < first + member.workers:
                return member.replica
            first += member.workers
        return ""


class EvaluationMark(Observed):
    """The loss on documents that were set aside."""

    step: Count = Field(description="Steps after which it was measured.")
    loss: float | None = Field(default=None, description="Mean loss of its tokens.")


class JobProgress(Observed):
    """How far the run is."""

    step: Count = Field(description="Steps finished since the run began.")
    steps: Count | None = Field(default=None, description="Steps of the whole run, where known.")
    percent: float | None = Field(default=None, ge=0, le=100, description="Share of steps that are finished.")
    eta_seconds: Seconds | None = Field(default=None, description="Seconds to the end at the present speed.")
    loss: float | None = Field(default=None, description="Mean loss of the last step's tokens.")
    step_seconds: Seconds | None = Field(default=None, description="What the last step took.")
    tokens: Count | None = Field(default=None, description="Trained on since the run began, each counted once.")
    tokens_per_second: Seconds | None = Field(default=None, description="Tokens trained on per second, all workers.")
    mfu: float | None = Field(default=None, description="Share of the devices' peak arithmetic that is used.")
    evaluation: EvaluationMark | None = Field(
        default=None, description="The last evaluation, where trainer.evaluation asks for any."
    )
    at: Timestamp = Field(description="When this was so.")


class SnapshotMark(Observed):
    """The newest snapshot in node memory that is complete on peers."""

    step: Count = Field(description="Its step.")
    at: Timestamp = Field(description="When it was seen to be complete.")


class CheckpointMark(Observed):
    """The newest checkpoint in durable storage; it can be loaded."""

    step: Count = Field(description="Its step.")
    round: Count = Field(default=0, description="The round that wrote it.")
    complete: bool = Field(default=False, description="Whether it is that of the run's last step.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")
    at: Timestamp = Field(description="When it became durable.")


class SampleRange(Observed):
    """Samples that were left out, by their position in the order of the run."""

    begin: Count = Field(description="The first of them.")
    end: Count = Field(description="The one after the last.")


class Rollback(Observed):
    """The last time that training went back because of what it had come to. States beyond `step` are not used again."""

    round: Count = Field(description="The round that was given up.")
    step: Count = Field(description="It went on from a state of this step or before.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="LossSpike, LossNotFinite or SilentCorruption.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why, in a sentence.")
    at: Timestamp = Field(description="When.")


class UndoneStates(Observed):
    """States that a rollback has made void."""

    round: Count = Field(description="Of this round or an earlier one, and ...")
    step: Count = Field(description="... beyond this step.")


class CheckpointEvery(Observed):
    """How often checkpoints are written, and how often would lose the least time (Young's and Daly's estimate)."""

    seconds: Seconds = Field(description="Between checkpoints by the clock; 0: by steps alone.")
    suggested_seconds: Seconds = Field(description="The best, by what was measured; everySeconds: auto follows it.")
    save_seconds: Seconds = Field(default=0.0, description="What training waited for a save, at most.")
    failure_seconds: Seconds = Field(default=0.0, description="Between failures, the next one taken to come now.")


class Restart(Observed):
    """One failure that needed a new round."""

    at: Timestamp = Field(description="When it was seen.")
    replica: Name = Field(description="The replica that failed first.")
    node: Name = Field(default="", description="Its node.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    step: Count = Field(default=0, description="Steps finished before it.")
    counted: bool = Field(default=True, description="False where the cause lies outside of the job: a lost node, say.")
    rung: Annotated[str, Field(max_length=32)] = Field(
        default="", description="What answered it: NewRound, WithoutMember, ReplacePod or WholeRestart."
    )
    error: Annotated[str, Field(max_length=200)] = Field(
        default="", description="What was said, without numbers and addresses: two with the same are the same failure."
    )
    after_seconds: Seconds = Field(default=0.0, description="Seconds since the round began.")


class LastFailure(Observed):
    """The last failure that ended a round, and what the worker that failed printed last."""

    at: Timestamp = Field(description="When it was seen.")
    round: Count = Field(description="The round that it ended.")
    replica: Name = Field(default="", description="The replica that failed; empty where none is to blame.")
    node: Name = Field(default="", description="Its node.")
    exit_code: int | None = Field(
        default=None, description="Of the worker; a negative one is the signal that killed it."
    )
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=1024)] = Field(description="Why, in a sentence.")
    last_lines: tuple[Annotated[str, Field(max_length=400)], ...] = Field(
        default=(), max_length=20, description="What the worker printed last. The log of its pod has all of it."
    )


class RungUse(Observed):
    """How much of one rung of the recovery ladder is used up."""

    rung: Annotated[str, Field(max_length=32)] = Field(description="NewRound, WithoutMember, ReplacePod, WholeRestart.")
    in_window: Count = Field(default=0, description="Failures within the window that it answered.")
    budget: Count | None = Field(
        default=None, description="Failures that it still answers in this window. Absent: there is no limit."
    )


class AvoidedNode(Observed):
    """A node that failed this job."""

    node: Name = Field(description="Its name.")
    until: Timestamp = Field(
        description="New pods keep off it until then; afterwards the entry only remembers it for a window."
    )
    reason: Annotated[str, Field(max_length=300)] = Field(default="", description="Why, in a sentence.")
    times: Count = Field(default=1, description="How often it was avoided: each time for twice as long.")


class Restarts(Observed):
    """Failures of the job's replicas."""

    in_window: Count = Field(default=0, description="Failures within failurePolicy.windowSeconds.")
    budget: Count = Field(default=0, description="Failures that are still borne in this window.")
    total: Count = Field(default=0, description="Failures since the job was created.")
    rungs: tuple[RungUse, ...] = Field(default=(), max_length=8, description="The recovery ladder, from the least up.")
    recent: tuple[Restart, ...] = Field(
        default=(), max_length=1001, description="The failures within the window, the newest fifty of them."
    )


class CheckpointRequest(Observed):
    """A checkpoint that a person asked for by the annotation concertina.dev/checkpoint-now."""

    id: Annotated[str, Field(max_length=63)] = Field(description="The annotation's value.")
    step: Count = Field(description="A durable checkpoint of this step or a later one fulfils it.")
    state: RequestState = Field(description="What became of it.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why, in a sentence.")
    at: Timestamp = Field(description="When it was first seen.")


class StragglerMark(Observed):
    """A rank that the others wait for in every step."""

    rank: Count = Field(description="Its number in the current round.")
    replica: Name = Field(description="Its replica.")
    node: Name = Field(default="", description="Its node.")
    seconds: Seconds = Field(description="What its own work in a step takes, waiting for others apart.")
    others_seconds: Seconds = Field(description="The median of that of the others.")
    since: Timestamp = Field(description="When it was named.")


class ShareMark(Observed):
    """What a replica computes of each step's batch, where that follows its speed."""

    replica: Name = Field(description="Its name.")
    node: Name = Field(default="", description="Its node.")
    sequences: Count = Field(description="How many of the batch's sequences.")
    factor: float = Field(ge=0, description="How many times an even share that is.")


class Condition(Observed):
    """One aspect of the job's state. Types: Ready, Stalled, Running, Suspended, Complete, Failed."""

    type: Annotated[str, Field(max_length=63)] = Field(description="Which aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="Why, and what to do.")
    last_transition_time: Timestamp = Field(description="When status last changed.")
    observed_generation: Count | None = Field(default=None, description="The generation that this speaks of.")


class Spares(Observed):
    """Replicas that stand by."""

    ready: Count = Field(default=0, description="Those that would join at once.")
    replicas: tuple[Name, ...] = Field(default=(), max_length=1000, description="Names of all, ready or not.")


class Growth(Observed):
    """The last time that replicas joined the running job, and how often in a row that went wrong."""

    round: Count = Field(default=0, description="The round that they joined in; 0 while none has.")
    joined: tuple[Name, ...] = Field(default=(), max_length=100, description="Who joined (the first hundred).")
    failures: Count = Field(default=0, description="How often in a row those who joined were soon lost again.")
    at: Timestamp | None = Field(default=None, description="When that was seen last.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="What went wrong, in a sentence.")


class Gang(Observed):
    """How it lets others go first that wait for room too, because it could not start."""

    releases: Count = Field(default=0, description="How often in a row.")
    since: Timestamp | None = Field(default=None, description="Since when it holds no pods. Absent: it may hold some.")
    until: Timestamp | None = Field(
        default=None, description="Until when the others go first. Absent: while somebody is ahead."
    )
    turn: Timestamp | None = Field(default=None, description="Since when it is first among those that wait.")
    priority: int = Field(default=0, description="Priority of its pods.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="For whom and why, in a sentence.")


class Internal(Observed):
    """The operator's own memory: what it must not forget when it is started again, and nobody else needs."""

    attempts: tuple[int, ...] = Field(
        default=(), max_length=11000, description="Attempt that each replica index is on; 0 beyond the list's end."
    )
    container_restarts: tuple[int, ...] = Field(
        default=(),
        max_length=10000,
        description="How often the container of each replica index was started again in its present pod; 0 beyond the "
        "list's end.",
    )
    gang: Gang = Field(default=Gang(), description="Room that was released for other jobs.")
    growth: Growth = Field(default=Growth(), description="How joining went.")
    undone: tuple[UndoneStates, ...] = Field(
        default=(), max_length=16, description="What rollbacks have made void: never gone on from again."
    )
    round_waits: RoundWaits = Field(default=RoundWaits(), description="What goodput has counted of this round.")
    incident: Incident | None = Field(default=None, description="That under way; it comes into status.incidents.")
    tokens_before: Count | None = Field(
        default=None, description="Of progress.tokens: trained on by the job that this one goes on from."
    )
    members: Packed | None = Field(
        default=None, description="Members of a world that is too large to list, packed. Absent: world.members has all."
    )
    restarts: Packed | None = Field(
        default=None, description="Failures of the window before those of restarts.recent, packed. Absent: it has all."
    )


OLD_PLACES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("attempts",): ("attempts",),
    ("containerRestarts",): ("containerRestarts",),
    ("gang",): ("gang",),
    ("growth",): ("growth",),
    ("undone",): ("undone",),
    ("roundWaits", "round"): ("goodput", "round"),
    ("roundWaits", "checkpointSeconds"): ("goodput", "roundCheckpointSeconds"),
    ("roundWaits", "stalledSeconds"): ("goodput", "roundStalledSeconds"),
}
"""Where in the status each part of `internal` stood before there was `internal`. For now it is written there as well:
an older CRD prunes `internal`, and an older operator looks in the old places only (decision "The operator's memory is
status.internal")."""


def with_internal(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """A status with what is internal in its place, as any operator wrote it."""
    if "internal" in status:
        return status
    internal: dict[str, Any] = {}
    for new, old in OLD_PLACES.items():
        value = _at(status, old)
        if value is not None:
            _put(internal, new, value)
    return {**status, "internal": internal}


PACKED = ("members", "restarts")
"""Of `internal`: not for plan(), which finds all in world.members and restarts.recent."""
LISTED_MEMBERS, LISTED_RESTARTS = 64, 50
"""More of them are packed (decision "A large status is packed"). No version before this one runs larger worlds."""


@functools.lru_cache(maxsize=16)
def packed_members(members: tuple[Member, ...]) -> str:
    """By column: what is alike stands together. Nodes are known from pods."""
    rows = ((m.replica, shortened(m.uid), shortened(m.instance), m.workers) for m in members)
    return pack([list(column) for column in zip(*rows, strict=True)])


@functools.lru_cache(maxsize=16)
def unpacked_members(text: str) -> tuple[Member, ...]:
    """None of them where that can't be read. Of one world they are the same objects, however often it is read."""
    try:
        return tuple(
            Member(replica=replica, uid=uid, instance=instance, workers=workers)
            for replica, uid, instance, workers in zip(*unpack(text), strict=True)
        )
    except (ValueError, TypeError):
        return ()


def packed_restarts(entries: Sequence[Restart]) -> str:
    return pack([entry.model_dump(mode="json", by_alias=True, exclude_defaults=True) for entry in entries])


def unpacked_restarts(text: str) -> tuple[Restart, ...]:
    """None of them where that can't be read."""
    try:
        return tuple(map(Restart.model_validate, unpack(text)))
    except (ValueError, TypeError):
        return ()


def with_packed(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """A status with what is packed in its place."""
    internal = status.get("internal")
    if not isinstance(internal, Mapping) or internal.keys().isdisjoint(PACKED):
        return status
    found = {**status, "internal": {**internal}}
    members, restarts = (found["internal"].pop(name, None) for name in PACKED)
    if isinstance(members, str) and isinstance(world := status.get("world"), Mapping):
        found["world"] = {**world, "members": unpacked_members(members)}
    if isinstance(restarts, str) and isinstance(told := status.get("restarts"), Mapping):
        listed = told.get("recent") or ()
        found["restarts"] = {**told, "recent": [*unpacked_restarts(restarts), *listed]}
    return found


def _at(manifest: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        manifest = manifest.get(name) if isinstance(manifest, Mapping) else None
    return manifest


def _put(manifest: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        manifest = manifest.setdefault(name, {})
    manifest[path[-1]] = value


class JobStatus(Observed):
    """What the operator last saw. Ready's reason is the word in the column Status of `kubectl get`."""

    observed_generation: Count | None = Field(default=None, description="Generation of the spec that this is about.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Ready, Stalled, Running, Suspended, Complete, Failed.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    start_time: Timestamp | None = Field(default=None, description="When the job was first seen, and not suspended.")
    completion_time: Timestamp | None = Field(default=None, description="When the job completed or failed.")
    replicas: Count = Field(
        default=0, description="Pods of the job that are not finished, without spares (for the scale subresource)."
    )
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Label selector of the job's pods (for the scale subresource)."
    )
    master_key: Annotated[str, Field(max_length=63)] = Field(
        default="", description="Id of the operator's master key that the job's certificates come from."
    )
    world: World = Field(default=World(), description="The current round and who is in it.")
    spares: Spares = Field(default=Spares(), description="Replicas that stand by.")
    progress: JobProgress | None = Field(default=None, description="How far the run is.")
    history: Annotated[str, Field(max_length=MOST_OF_HISTORY)] | None = Field(
        default=None,
        description="Loss and world over time, 60 points at most, packed: `concertina status` draws them.",
    )
    last_snapshot: SnapshotMark | None = Field(default=None, description="Newest snapshot that is complete on peers.")
    last_checkpoint: CheckpointMark | None = Field(default=None, description="Newest durable checkpoint.")
    rollback: Rollback | None = Field(default=None, description="The last time that training was undone.")
    skipped: tuple[SampleRange, ...] = Field(
        default=(), max_length=32, description="Samples that were left out, as trainer.anomalies says."
    )
    checkpoint_interval: CheckpointEvery | None = Field(
        default=None, description="How often checkpoints are written, and how often would be best."
    )
    checkpoint_request: CheckpointRequest | None = Field(
        default=None, description="The last checkpoint that a person asked for, and what became of it."
    )
    restarts: Restarts = Field(default=Restarts(), description="Failures of the job's replicas.")
    last_failure: LastFailure | None = Field(
        default=None, description="The last failure that ended a round. Absent: there was none."
    )
    avoided_nodes: tuple[AvoidedNode, ...] = Field(
        default=(), max_length=32, description="Nodes that failed this job again and again."
    )
    stragglers: tuple[StragglerMark, ...] = Field(
        default=(), max_length=16, description="Ranks that the others wait for in every step."
    )
    shares: tuple[ShareMark, ...] = Field(
        default=(),
        max_length=16,
        description="With trainer.data.balance speed: how much replicas compute, those with the least first.",
    )
    starts_plainly: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Why the workers start plainly, though spec.warmStart asks for more. Absent: they start warm, or "
        "nothing is known yet.",
    )
    imports_anew: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="What each start of a worker imports by itself, and why, though it starts warm: a module of "
        "spec.warmStart.preload that can't be imported, say. Absent: nothing but the script's own modules, or nothing "
        "is known yet.",
    )
    tracking: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Why the tracker of spec.tracking takes nothing, as the lead has it; it is kept on the node "
        "meanwhile. Absent: it does, or nothing is known yet.",
    )
    rounds: Count = Field(default=0, description="Rounds that were committed.")
    steps_replayed: Count = Field(default=0, description="Steps that were trained again after failures.")
    goodput: Goodput = Field(default=Goodput(), description="Where the time since the job's creation went.")
    incidents: tuple[Incident, ...] = Field(
        default=(),
        max_length=MOST_INCIDENTS,
        description="The last times without training and what each cost, the newest last.",
    )
    cost: Cost | None = Field(default=None, description="What the job costs. Absent: spec.price says no price.")
    internal: Internal = Field(default=Internal(), description="What the operator has to remember; not for reading.")

    @model_validator(mode="before")
    @classmethod
    def _from_old_places(cls, raw: Any) -> Any:
        return with_packed(with_internal(raw)) if isinstance(raw, Mapping) else raw

    def manifest(self) -> dict[str, Any]:
        """With what is internal in its old places too, and what is too long to list packed."""
        found = self._listed().model_dump(mode="json", by_alias=True, exclude_none=True)
        for new, old in OLD_PLACES.items():
            value = _at(found["internal"], new)
            if not isinstance(value, list) or len(value) <= LISTED_MEMBERS:
                _put(found, old, value)
        return found

    def _listed(self) -> JobStatus:
        members, recent = self.world.members, self.restarts.recent
        outer: dict[str, Any] = {}
        packed: dict[str, str] = {}
        if len(members) > LISTED_MEMBERS:
            outer["world"] = self.world.model_copy(update={"members": ()})
            packed["members"] = packed_members(members)
        if len(recent) > LISTED_RESTARTS:
            outer["restarts"] = self.restarts.model_copy(update={"recent": recent[-LISTED_RESTARTS:]})
            packed["restarts"] = packed_restarts(recent[:-LISTED_RESTARTS])
        if not packed:
            return self
        return self.model_copy(update={**outer, "internal": self.internal.model_copy(update=packed)})

    def condition(self, type: str) -> Condition | None:
        """The condition of that type, None where it was never set."""
        for condition in self.conditions:
            if condition.type == type:
                return condition
        return None

    def true_condition(self, type: ConditionType) -> Condition | None:
        """That condition where it holds."""
        condition = self.condition(type)
        return condition if condition is not None and condition.status == "True" else None

    def is_true(self, type: ConditionType) -> bool:
        """Whether there is such a condition, and it holds."""
        return self.true_condition(type) is not None

    @property
    def phase(self) -> str:
        """The word in the column Status; empty where no operator has seen the job."""
        ready = self.condition(ConditionType.READY)
        return ready.reason if ready else ""
