"""What happens to an agent (events) and what it must do about it (effects). Data only; see `machine` for the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

import concertina_protocol as p
from concertina_protocol import worker_channel as w


class Moment(NamedTuple):
    """When an event is taken."""

    now: float
    """Monotonic seconds."""
    at: float
    """Unix seconds: only for what people read (Failure.at)."""


# --- events ---------------------------------------------------------------------------------------------------------

Request = Union[p.Prepare, p.Assign, p.Drain, p.Save, p.Join, p.Ping, p.Trace]


@dataclasses.dataclass(frozen=True)
class RequestReceived:
    """A request over the wire; answered by exactly one Reply with the same `request` number, sooner or later."""

    request: int
    message: Request


@dataclasses.dataclass(frozen=True)
class WorkersGone:
    """Answer to KillWorkers: no process of a lower round is left, and the volume has been read since."""

    round: int
    held: Optional[tuple[p.HeldSnapshot, ...]] = None
    """What the volume holds. None: as this core believes (a worker leaves its newest three whole)."""


@dataclasses.dataclass(frozen=True)
class StoreBound:
    """Answer to BindStore."""

    round: int
    claim: str
    address: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """Answer to PingPeers: the candidates that answered a Ping, oneself included."""

    prepare: p.Prepare
    replicas: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StartFailed:
    """The workers of this round could not be started."""

    round: int
    message: str


@dataclasses.dataclass(frozen=True)
class WorkerMessage:
    """`message` is one of Hello, Progress, Beat, Committed, WantDurable, Done, Fault, Attends, Passed. For a
    command of one's own the shell says Hello when the process has started."""

    round: int
    rank: int
    message: w.Message


@dataclasses.dataclass(frozen=True)
class WorkerExited:
    """After the last WorkerMessage of this worker. `code` is negative for a signal, as in `subprocess`."""

    round: int
    rank: int
    code: int
    last_lines: tuple[str, ...] = ()
    last_error: str = ""
    """The last line of stderr: with stdout buffered, its lines come last though they were printed first."""
    out_of_memory: bool = False
    """Meanwhile the kernel has killed a process of this container for want of memory."""


@dataclasses.dataclass(frozen=True)
class MemberMessage:
    """A line on the stream that this member's accepted Join opened."""

    state: p.MemberState


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """A member is lost: its stream broke and its agent could not be reached, or the member said what it may not."""

    round: int
    claim: str
    replica: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class CoordinatorJoined:
    """Our own Join was accepted: the first one, or another one after the stream broke."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class CoordinatorMessage:
    """A line of the coordinator: Drain, StopAt, DurableMoved, or a beat (MemberState)."""

    round: int
    claim: str
    message: Union[p.Drain, p.StopAt, p.DurableMoved, p.MemberState]


@dataclasses.dataclass(frozen=True)
class CoordinatorGone:
    """The stream to the coordinator broke and stayed broken, or the coordinator refused our Join for good."""

    round: int
    claim: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class PeerCopied:
    """The member after us holds this shard of ours."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class CopyHeld:
    """We hold this shard of the member before us."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class PartShipped:
    """Answer to Ship: the shard is in durable storage."""

    part: p.Part


@dataclasses.dataclass(frozen=True)
class PublishDone:
    """Answer to Publish: `durable` is what LATEST names now; None: the fence refused it, for good."""

    id: p.SnapshotId
    durable: Optional[p.Durable]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class StorageSeen:
    """News of durable storage."""

    storage: p.Storage


@dataclasses.dataclass(frozen=True)
class TrackingSeen:
    """News of the tracker."""

    trouble: str
    """Why it does not take what is to be tracked, in a sentence; empty where it does."""


@dataclasses.dataclass(frozen=True)
class Warm:
    """Workers can start at once from now on; or, with `error`, never."""

    error: str = ""


@dataclasses.dataclass(frozen=True)
class Learning:
    """Another replica is being asked what there is to import before workers start; or not any more."""

    under_way: bool


@dataclasses.dataclass(frozen=True)
class WarmStartKnown:
    """What a command of one's own is not spared at each start, though a warm start is asked for; replaces what was
    known before."""

    warm_start_disabled_reason: str = ""
    """Why it is not started warm at all."""
    warm_start_skipped_modules: str = ""
    """What it has to import by itself, and why."""


@dataclasses.dataclass(frozen=True)
class WorldsSeen:
    """The workers of this round were looked at: whether each trains in a world of its own."""

    round: int
    mismatch: str
    """How, in a clause; empty if one of them does not."""


@dataclasses.dataclass(frozen=True)
class TerminationNotice:
    """SIGTERM: this pod is to go within `grace` seconds."""

    grace: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed; a few times a second."""

    heartbeats: tuple[p.Heartbeat, ...] = ()
    """Of own workers that write one."""
    stopped: tuple[tuple[int, int], ...] = ()
    """Ranks of own workers that are stopped (SIGSTOP), and the CPU time that each has used."""


@dataclasses.dataclass(frozen=True)
class StacksCollected:
    """Answer to CollectStacks: bounded lines by rank."""

    round: int
    stacks: Mapping[int, tuple[str, ...]]


Event = Union[
    RequestReceived, WorkersGone, StoreBound, Reached, StartFailed, WorkerMessage, WorkerExited, MemberMessage,
    MemberGone, CoordinatorJoined, CoordinatorMessage, CoordinatorGone, PeerCopied, CopyHeld, PartShipped, PublishDone,
    StorageSeen, TrackingSeen, Warm, Learning, WarmStartKnown, WorldsSeen, TerminationNotice, Tick, StacksCollected,
]  # fmt: skip

# --- effects --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PersistSeen:
    """Must be in the volume for good before WorkersGone of this round is told: until then nothing is answered, and
    nothing starts."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class KillWorkers:
    """Leave everything older than `round`: SIGKILL and reap its workers, end its store, copier, shipping and streams
    (both to the coordinator and of members). Then WorkersGone(round). Comes again where a kill was asked for again."""

    round: int


@dataclasses.dataclass(frozen=True)
class BindStore:
    """Then StoreBound."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class PingPeers:
    """With a short limit. Then Reached."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Those of its candidates to ping, oneself included (`probes`)."""


@dataclasses.dataclass(frozen=True)
class Reply:
    request: int
    message: Union[p.Prepared, p.Accepted, p.Refused]


@dataclasses.dataclass(frozen=True)
class StartRound:
    """Start the workers of members[me]; serve the bound store if `coordinator`, else close it; else join the
    coordinator (members[0]), again and again until it says yes or the round is over."""

    assign: p.Assign
    me: int

    @property
    def coordinator(self) -> bool:
        return self.me == 0


@dataclasses.dataclass(frozen=True)
class CopyFrom:
    """Copy every snapshot of these shards of this round as it is committed by that member; CopyHeld after each."""

    round: int
    member: p.Member
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DropSnapshots:
    """These, and what was fetched from peers: no worker asks for it any more."""

    ids: tuple[p.SnapshotId, ...]


@dataclasses.dataclass(frozen=True)
class SendToWorker:
    rank: int
    message: Union[w.DrainRequest, w.SaveNow, w.TraceSteps, w.CopiedUpTo, w.Registered, w.QueryCalls, w.StopAtCall]


@dataclasses.dataclass(frozen=True)
class SignalWorkers:
    """To the process group of every worker of the round that is still there."""

    signal: int


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """From the coordinator, on the streams of this round; `only`: one replica."""

    message: Union[p.Drain, p.StopAt, p.DurableMoved]
    only: str = ""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Put the file into storage, with retries, until it is there (PartShipped) or the round is over; another one
    of the same shard is given up."""

    id: p.SnapshotId
    shard: int
    path: str
    is_slot: bool = False
    """The path is the slot's own, not a second name that a worker has given it to be shipped under."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """All parts are in storage: write the manifest and move LATEST, with retries; then PublishDone."""

    id: p.SnapshotId
    complete: bool


@dataclasses.dataclass(frozen=True)
class Undo:
    """LATEST is to name nothing that was undone, before anything else is published, and whatever becomes of the round;
    with retries. Then StorageSeen."""

    undone: p.Undone


@dataclasses.dataclass(frozen=True)
class CollectStacks:
    """The stacks of all own workers, in full into the log; then StacksCollected."""

    round: int


@dataclasses.dataclass(frozen=True)
class ReportChanged:
    """AgentState.report() and .member_state() say something new: tell the watchers and the coordinator. At most once
    per event and last."""


@dataclasses.dataclass(frozen=True)
class UseStorage:
    """A script's state goes to durable storage as well: look into it (StorageSeen), and be ready to write."""


@dataclasses.dataclass(frozen=True)
class ProbeStorage:
    """What is known of LATEST may be out of date; StorageSeen follows."""


@dataclasses.dataclass(frozen=True)
class Exit:
    code: int


@dataclasses.dataclass(frozen=True)
class IllegalTransition:
    """An event has led where `states.TRANSITIONS` has no arrow. Tests fail with it; an agent logs it and goes on, for
    what it knows is as true as before, and its end would cost a round."""

    what: str


Effect = Union[
    PersistSeen, KillWorkers, BindStore, PingPeers, Reply, StartRound, CopyFrom, DropSnapshots, SendToWorker,
    SignalWorkers, Broadcast, Ship, Publish, Undo, UseStorage, ProbeStorage, CollectStacks, ReportChanged, Exit,
    IllegalTransition,
]  # fmt: skip
