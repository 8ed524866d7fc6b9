"""Events that an agent receives, and effects that it must carry out, as data classes.

The module `machine` computes the effects of an event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

import concertina_protocol as p
from concertina_protocol import worker_channel as w


class Moment(NamedTuple):
    """Time at which an event is processed, by two clocks."""

    now: float
    """Monotonic time in seconds."""
    at: float
    """Unix time in seconds. It is used only in messages for people (Failure.at)."""


# --- events ---------------------------------------------------------------------------------------------------------

Request = Union[p.Prepare, p.Assign, p.Release, p.Drain, p.Save, p.Join, p.Ping, p.Trace]


@dataclasses.dataclass(frozen=True)
class RequestReceived:
    """Event: a request has arrived.

    The agent answers the request by exactly one Reply with the same `request` number, possibly later.
    """

    request: int
    message: Request


@dataclasses.dataclass(frozen=True)
class WorkersGone:
    """Event after KillWorkers: all workers of rounds before `round` have ended.

    Before this event, the agent has read again which snapshots the volume contains.
    """

    round: int
    held: Optional[tuple[p.HeldSnapshot, ...]] = None
    """Snapshots that are in the volume, or None if the volume was not read.

    In the case of None, the agent continues with its own record of committed snapshots. That is correct because a
    worker's newest three snapshots are always complete.
    """
    replaced: tuple[p.Replaced, ...] = ()
    """Reasons why workers that were still running had to be killed, instead of entering the next round."""


@dataclasses.dataclass(frozen=True)
class StoreBound:
    """Event after BindStore: a port is bound for the round's c10d store, at which the ranks rendezvous."""

    round: int
    claim: str
    address: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """Event after PingPeers: the candidates for the round that have answered a Ping, including this agent itself."""

    prepare: p.Prepare
    replicas: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StartFailed:
    """Event: the workers of a round could not be started."""

    round: int
    message: str


@dataclasses.dataclass(frozen=True)
class WorkerMessage:
    """Event: a worker has sent a message to this agent.

    `message` is one of Hello, Progress, Beat, Committed, WantDurable, Done, Fault, KeepsState, Register and CallCount.
    For a user's own command, the agent itself produces Hello when the process has started.
    """

    round: int
    rank: int
    message: w.Message


@dataclasses.dataclass(frozen=True)
class WorkerExited:
    """Event: a worker has exited. This event comes after all messages of that worker.

    `code` is negative for a signal, as in `subprocess`.
    """

    round: int
    rank: int
    code: int
    last_lines: tuple[str, ...] = ()
    last_error: str = ""
    """Last line that the worker wrote to stderr.

    The last line of stdout and stderr together would be less useful: if stdout is buffered, its lines arrive after
    lines of stderr that were printed later.
    """
    out_of_memory: bool = False
    """True if the kernel killed a process of this container for lack of memory since the worker started."""


@dataclasses.dataclass(frozen=True)
class MemberMessage:
    """Event on the coordinator: a member of the round has sent a message on its stream to the coordinator.

    The coordinator is the agent of rank 0.
    """

    state: p.MemberState


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """Event on the coordinator (the agent of rank 0): a member of the round is lost.

    The member's stream broke and its agent could not be reached, or the member sent an invalid message.
    """

    round: int
    claim: str
    replica: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class CoordinatorJoined:
    """Event on a member: the coordinator (the agent of rank 0) has accepted the member's Join.

    The event occurs again each time a new stream replaces a broken one.
    """

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class CoordinatorMessage:
    """Event on a member: the coordinator has sent a message, which is Drain, StopAt, DurableMoved or a MemberState.

    The coordinator is the agent of rank 0. In a drain, all ranks stop after the same step.
    """

    round: int
    claim: str
    message: Union[p.Drain, p.StopAt, p.DurableMoved, p.MemberState]


@dataclasses.dataclass(frozen=True)
class CoordinatorGone:
    """Event on a member: the coordinator (the agent of rank 0) is lost.

    The stream broke and could not be opened again, or the coordinator refused this agent's Join permanently.
    """

    round: int
    claim: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class PeerCopied:
    """Event: another replica has copied a shard that a worker of this agent has saved.

    The members form a ring, in which each member copies the previous member's shards. The replica that has copied the
    shard is therefore the next member of the ring.
    """

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class CopyHeld:
    """Event: this agent has copied a shard of the previous member.

    The members form a ring, in which each member copies the previous member's shards.
    """

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class PartShipped:
    """Event after Ship: a shard is in durable storage."""

    part: p.Part


@dataclasses.dataclass(frozen=True)
class PublishDone:
    """Event after Publish: the attempt to publish a checkpoint is over.

    `durable` is the checkpoint that the file LATEST in storage names now. `durable` is None if the checkpoint was
    refused permanently, because a later round or another job has published a checkpoint.
    """

    id: p.SnapshotId
    durable: Optional[p.Durable]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class StorageSeen:
    """Event: durable storage has been checked. The event contains the state of storage."""

    storage: p.Storage


@dataclasses.dataclass(frozen=True)
class TrackingSeen:
    """Event: the tracking tool, such as MLflow, has begun or ceased to accept records of the run."""

    trouble: str
    """Sentence about why the tracking tool does not accept records, or "" if it does."""


@dataclasses.dataclass(frozen=True)
class Warm:
    """Event: the preparation for warm starts has ended, so workers can start at once.

    A warm start forks workers from a process that has already imported their modules. If `error` is set, the
    preparation has failed, and no workers can start.
    """

    error: str = ""


@dataclasses.dataclass(frozen=True)
class Learning:
    """Event: this agent has begun or ended a request to another replica for the modules that the user's script imports.

    A warm start imports these modules before the workers start.
    """

    under_way: bool


@dataclasses.dataclass(frozen=True)
class WarmStartKnown:
    """Event: the agent now knows whether warm starts work for the user's command.

    The event says why the command has no warm start, or which modules each worker imports again in spite of its warm
    start. A later event of this class replaces an earlier one.
    """

    warm_start_disabled_reason: str = ""
    """Reason why the command has no warm start, or "" if it has one.

    A warm start forks the workers from a process that has imported the script's modules.
    """
    warm_start_skipped_modules: str = ""
    """Modules that each worker must import itself, although it was forked from a process with the script's modules.

    The text is "" if there are no such modules. Otherwise it also says why each module was not imported in advance.
    """


@dataclasses.dataclass(frozen=True)
class WorldsSeen:
    """Event: the agent has found out whether each worker of this round trains separately from the others."""

    round: int
    mismatch: str
    """Part of a sentence that says how each worker trains in a world of its own, or "" unless all workers do."""


@dataclasses.dataclass(frozen=True)
class TerminationNotice:
    """Event: this agent has received SIGTERM, and the pod must end within `grace` seconds."""

    grace: float


@dataclasses.dataclass(frozen=True)
class StepCount:
    """Number of optimizer steps of a script's process, which a hook in torch counts."""

    rank: int
    steps: int
    """Number of optimizer steps since the process started, at least 1."""
    first_at: float
    """Time of the first step in Unix seconds."""
    seconds: float
    """Duration of the last step in seconds, or 0 before the second step."""
    optimizer: str
    """Class of the optimizer whose steps are counted."""
    still: float
    """Seconds since the last optimizer step."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """Event: time has passed. This event occurs a few times per second."""

    heartbeats: tuple[p.Heartbeat, ...] = ()
    """Heartbeats of those workers of this agent that write heartbeats."""
    stopped: tuple[tuple[int, int], ...] = ()
    """Ranks of this agent's workers that are stopped (SIGSTOP), with the CPU seconds that each has used."""
    counts: tuple[StepCount, ...] = ()
    """Optimizer steps of those workers of this agent whose steps are counted."""


@dataclasses.dataclass(frozen=True)
class GpuFaultSeen:
    """Event: a GPU of this replica is faulty, as an error of the GPU's driver or the preflight has shown."""

    clause: str
    by_preflight: bool = False


@dataclasses.dataclass(frozen=True)
class PreflightDone:
    """Event: the preflight has ended or was skipped, so this replica may become ready."""


@dataclasses.dataclass(frozen=True)
class StacksCollected:
    """Event after CollectStacks: the call stacks of this agent's workers, keyed by rank.

    Each stack is shortened to a limited number of lines.
    """

    round: int
    stacks: Mapping[int, tuple[str, ...]]
    calls: Mapping[int, tuple[p.GroupCalls, ...]] = dataclasses.field(default_factory=dict)
    """Collectives of those workers whose flight recorder has answered, keyed by rank."""


Event = Union[
    RequestReceived, WorkersGone, StoreBound, Reached, StartFailed, WorkerMessage, WorkerExited, MemberMessage,
    MemberGone, CoordinatorJoined, CoordinatorMessage, CoordinatorGone, PeerCopied, CopyHeld, PartShipped, PublishDone,
    StorageSeen, TrackingSeen, Warm, Learning, WarmStartKnown, WorldsSeen, TerminationNotice, Tick, StacksCollected,
    GpuFaultSeen, PreflightDone,
]  # fmt: skip

# --- effects --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PersistSeen:
    """Effect: write the highest round and its claim to the volume, and sync the file to the disk.

    A claim is the operator's decision to begin a round. WorkersGone of this round is emitted only after the write.
    Until then, the agent answers no request and starts no worker.
    """

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class KillWorkers:
    """Effect: end all workers and transfers of rounds before `round`, then emit WorkersGone(round).

    If a worker's process can continue in the next round, the agent asks the process to leave its round. The agent kills
    all other workers by SIGKILL. The agent also closes the c10d store and the streams between coordinator and members,
    and cancels copies and uploads. If the effect occurs again for the same round, the agent carries it out again.

    The coordinator is the agent of rank 0.
    """

    round: int


@dataclasses.dataclass(frozen=True)
class BindStore:
    """Effect: bind a port for the round's c10d store, at which the ranks rendezvous. Then emit StoreBound."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class PingPeers:
    """Effect: send a Ping to candidates for the next round, with a short timeout, then emit Reached."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Candidates that get a Ping, including this agent (see `probes`)."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """Effect: send the answer to a request."""

    request: int
    message: Union[p.Prepared, p.Accepted, p.Refused]


@dataclasses.dataclass(frozen=True)
class StartRound:
    """Effect: start the workers of this replica for a round. The entry `members[me]` of the round is this replica.

    The coordinator is the agent of rank 0. If `coordinator` is set, this agent serves the round's c10d store at the
    port that was bound. Otherwise, this agent closes the port and sends a Join to the coordinator (members[0]). The
    Join is repeated until the coordinator accepts it or the round is over.
    """

    assign: p.Assign
    me: int

    @property
    def coordinator(self) -> bool:
        return self.me == 0


@dataclasses.dataclass(frozen=True)
class CopyFrom:
    """Effect: copy the shards of a member to this replica each time that member has saved a snapshot in this round.

    After each copy, emit CopyHeld.
    """

    round: int
    member: p.Member
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DropSnapshots:
    """Effect: delete the snapshots `ids`, and all shards that starting workers have fetched from other replicas.

    No worker needs these files any more.
    """

    ids: tuple[p.SnapshotId, ...]


@dataclasses.dataclass(frozen=True)
class SendToWorker:
    """Effect: send a message to a worker."""

    rank: int
    message: Union[w.DrainRequest, w.SaveNow, w.TraceSteps, w.CopiedUpTo, w.Registered, w.QueryCalls, w.StopAtCall]


@dataclasses.dataclass(frozen=True)
class SignalWorkers:
    """Effect: send a signal to the process group of each worker of the round that has not ended."""

    signal: int


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Effect on the coordinator: send a message to all members of this round, or only to the replica `only`.

    The coordinator is the agent of rank 0.
    """

    message: Union[p.Drain, p.StopAt, p.DurableMoved]
    only: str = ""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Effect: upload a shard file to storage. Repeat until the file is in storage (PartShipped) or the round is over.

    If an earlier upload of the same shard is not finished, the agent abandons it.
    """

    id: p.SnapshotId
    shard: int
    path: str
    is_slot: bool = False
    """True if `path` is the file of the slot itself. Otherwise, it is a hard link that a worker has made for the
    upload."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """Effect on the coordinator: publish a checkpoint whose shards are all in storage, then emit PublishDone.

    The uploader writes the checkpoint's manifest. Then it writes the checkpoint's name to the file LATEST, which names
    the checkpoint from which jobs continue. Failed attempts are repeated.

    The coordinator is the agent of rank 0.
    """

    id: p.SnapshotId
    complete: bool


@dataclasses.dataclass(frozen=True)
class Undo:
    """Effect on the coordinator (the agent of rank 0): apply a rollback to storage, then emit StorageSeen.

    If the file LATEST names a checkpoint that the rollback has undone, LATEST is changed. Failed attempts are repeated,
    even after the end of the round. Until an attempt succeeds, no checkpoint is published.
    """

    undone: p.Undone


@dataclasses.dataclass(frozen=True)
class CollectStacks:
    """Effect: write the stacks and collectives of this agent's workers to the log, then emit StacksCollected."""

    round: int


@dataclasses.dataclass(frozen=True)
class ReportChanged:
    """Effect: send this agent's new Report to the operator, and its new MemberState to the coordinator.

    This effect occurs at most once per event, after all other effects of the event.
    """


@dataclasses.dataclass(frozen=True)
class UseStorage:
    """Effect: begin to use durable storage for a script's state.

    Check storage (StorageSeen), and start the uploader.
    """


@dataclasses.dataclass(frozen=True)
class ProbeStorage:
    """Effect: check which checkpoint the file LATEST in storage names, then emit StorageSeen.

    The checkpoint that the agent knows is outdated if LATEST has changed in rounds in which the agent did not take
    part.
    """


@dataclasses.dataclass(frozen=True)
class Exit:
    """Effect: end the agent's process with this exit code."""

    code: int


@dataclasses.dataclass(frozen=True)
class IllegalTransition:
    """Effect: report a change of state that `states.TRANSITIONS` does not allow.

    In tests, this effect is an error. An agent writes the effect to the log and continues, because its facts are still
    correct, and an exit would end the round.
    """

    what: str


Effect = Union[
    PersistSeen, KillWorkers, BindStore, PingPeers, Reply, StartRound, CopyFrom, DropSnapshots, SendToWorker,
    SignalWorkers, Broadcast, Ship, Publish, Undo, UseStorage, ProbeStorage, CollectStacks, ReportChanged, Exit,
    IllegalTransition,
]  # fmt: skip
