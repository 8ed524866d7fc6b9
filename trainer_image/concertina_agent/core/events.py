"""Events that an agent handles, and effects that must be carried out.

This module contains only data classes. `machine` contains the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

import concertina_protocol as p
from concertina_protocol import worker_channel as w


class Moment(NamedTuple):
    """Time at which an event is handled, by two clocks."""

    now: float
    """Monotonic time in seconds."""
    at: float
    """Unix time in seconds. Used only in messages for people (Failure.at)."""


# --- events ---------------------------------------------------------------------------------------------------------

Request = Union[p.Prepare, p.Assign, p.Release, p.Drain, p.Save, p.Join, p.Ping, p.Trace]


@dataclasses.dataclass(frozen=True)
class RequestReceived:
    """Request on a connection. It is answered by exactly one Reply with the same `request` number, possibly later."""

    request: int
    message: Request


@dataclasses.dataclass(frozen=True)
class WorkersGone:
    """All workers of rounds below this one are gone, and the volume has been read since. Answers KillWorkers."""

    round: int
    held: Optional[tuple[p.HeldSnapshot, ...]] = None
    """Snapshots that are in the volume.

    If None, the agent's own record of committed snapshots is used instead, because each worker has left its newest
    three complete.
    """
    replaced: tuple[p.Replaced, ...] = ()
    """For each worker that was killed before it had ended, the reason why it can't enter the next round."""


@dataclasses.dataclass(frozen=True)
class StoreBound:
    """The store's port has been bound. Answers BindStore."""

    round: int
    claim: str
    address: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """Candidates that answered a Ping, including this agent. Answers PingPeers."""

    prepare: p.Prepare
    replicas: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StartFailed:
    """The workers of this round could not be started."""

    round: int
    message: str


@dataclasses.dataclass(frozen=True)
class WorkerMessage:
    """Message of a worker to this agent.

    `message` is one of Hello, Progress, Beat, Committed, WantDurable, Done, Fault, KeepsState, Register and CallCount.
    For a user's own command, the agent itself produces Hello when the process has started.
    """

    round: int
    rank: int
    message: w.Message


@dataclasses.dataclass(frozen=True)
class WorkerExited:
    """A worker has exited. All its messages have been handled before.

    `code` is negative for a signal, as in `subprocess`.
    """

    round: int
    rank: int
    code: int
    last_lines: tuple[str, ...] = ()
    last_error: str = ""
    """Last line that the worker wrote to stderr.

    It is more useful than the last line of all output: if stdout is buffered, its lines arrive last although they were
    printed first.
    """
    out_of_memory: bool = False
    """Whether the kernel killed a process of this container for lack of memory since the worker started."""


@dataclasses.dataclass(frozen=True)
class MemberMessage:
    """A member has sent a line on its stream to this coordinator. The stream was opened by an accepted Join."""

    state: p.MemberState


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """A member is lost to this coordinator.

    Its stream broke and its agent could not be reached, or it sent an invalid message.
    """

    round: int
    claim: str
    replica: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class CoordinatorJoined:
    """The coordinator has accepted this agent's Join. This happens again after the stream was broken."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class CoordinatorMessage:
    """The coordinator has sent a line: Drain, StopAt, DurableMoved, or its MemberState as a heartbeat."""

    round: int
    claim: str
    message: Union[p.Drain, p.StopAt, p.DurableMoved, p.MemberState]


@dataclasses.dataclass(frozen=True)
class CoordinatorGone:
    """The coordinator is lost to this member.

    Its stream broke and could not be opened again, or it refused this agent's Join permanently.
    """

    round: int
    claim: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class PeerCopied:
    """The next member has copied this shard of this agent."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class CopyHeld:
    """This agent has copied this shard of the previous member."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class PartShipped:
    """A shard is in durable storage. Answers Ship."""

    part: p.Part


@dataclasses.dataclass(frozen=True)
class PublishDone:
    """The request Publish is finished. `durable` is the checkpoint that LATEST names now.

    If the checkpoint was refused permanently, because a later round or another job has written to the folder, `durable`
    is None.
    """

    id: p.SnapshotId
    durable: Optional[p.Durable]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class StorageSeen:
    """The state of durable storage has been checked."""

    storage: p.Storage


@dataclasses.dataclass(frozen=True)
class TrackingSeen:
    """The tracking tool has begun or ceased to accept records."""

    trouble: str
    """Sentence about why the tracking tool does not accept records, or "" if it does."""


@dataclasses.dataclass(frozen=True)
class Warm:
    """Preparation for warm starts has ended. Workers can start at once, or never if `error` is set."""

    error: str = ""


@dataclasses.dataclass(frozen=True)
class Learning:
    """This agent begins or ends to ask another replica which modules to import before workers start."""

    under_way: bool


@dataclasses.dataclass(frozen=True)
class WarmStartKnown:
    """What a user's own command does at each start although a warm start is requested.

    A new event replaces the previous one.
    """

    warm_start_disabled_reason: str = ""
    """Reason why the command does not get a warm start at all, or ""."""
    warm_start_skipped_modules: str = ""
    """Modules that the command has to import again at each start, with the reasons, or ""."""


@dataclasses.dataclass(frozen=True)
class WorldsSeen:
    """It has been checked whether each worker of this round trains in a world of its own."""

    round: int
    mismatch: str
    """Clause that says how each worker trains in a world of its own, or "" if some worker does not."""


@dataclasses.dataclass(frozen=True)
class TerminationNotice:
    """This agent has received SIGTERM: the pod must end within `grace` seconds."""

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
    """Time has passed. This event occurs a few times per second."""

    heartbeats: tuple[p.Heartbeat, ...] = ()
    """Heartbeats of this agent's workers, as far as they write any."""
    stopped: tuple[tuple[int, int], ...] = ()
    """Ranks of this agent's workers that are stopped (SIGSTOP), with the CPU seconds that each has used."""
    counts: tuple[StepCount, ...] = ()
    """Optimizer steps of this agent's workers, as far as they are counted."""


@dataclasses.dataclass(frozen=True)
class StacksCollected:
    """Stacks of this agent's workers have been collected: a limited number of lines by rank. Answers CollectStacks."""

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
    """Write the highest round to the volume, synced to the disk.

    WorkersGone of this round is emitted only after the write. Until then, no request is answered and nothing starts.
    """

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class KillWorkers:
    """End everything of rounds below `round`, then emit WorkersGone(round).

    A worker whose process can stay leaves its round. All other workers are killed by SIGKILL and reaped. The store,
    copies, uploads, and the streams to the coordinator and to members are ended. If this effect occurs again, it is
    carried out again.
    """

    round: int


@dataclasses.dataclass(frozen=True)
class BindStore:
    """Bind a port for the store, then emit StoreBound."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class PingPeers:
    """Send a Ping to candidates, with a short timeout, then emit Reached."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Candidates that get a Ping, including this agent (see `probes`)."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """Send the answer to a request."""

    request: int
    message: Union[p.Prepared, p.Accepted, p.Refused]


@dataclasses.dataclass(frozen=True)
class StartRound:
    """Start the workers of this agent's member in the round, members[me].

    If `coordinator` is set, serve the store at the port that was bound. Otherwise, close that port, and join the
    coordinator (members[0]). The Join is repeated until it is accepted or the round is over.
    """

    assign: p.Assign
    me: int

    @property
    def coordinator(self) -> bool:
        return self.me == 0


@dataclasses.dataclass(frozen=True)
class CopyFrom:
    """Copy these shards from another member after each of its commits in this round. Emit CopyHeld after each copy."""

    round: int
    member: p.Member
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DropSnapshots:
    """Delete these snapshots, and all shards that were fetched from peers, which no worker needs any more."""

    ids: tuple[p.SnapshotId, ...]


@dataclasses.dataclass(frozen=True)
class SendToWorker:
    """Send a message to a worker."""

    rank: int
    message: Union[w.DrainRequest, w.SaveNow, w.TraceSteps, w.CopiedUpTo, w.Registered, w.QueryCalls, w.StopAtCall]


@dataclasses.dataclass(frozen=True)
class SignalWorkers:
    """Send a signal to the process group of each worker of the round that still exists."""

    signal: int


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Send a message of the coordinator to all members of this round, or only to the replica `only`."""

    message: Union[p.Drain, p.StopAt, p.DurableMoved]
    only: str = ""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Upload a shard file to storage. Repeat until it is there (PartShipped) or the round is over.

    An earlier upload of the same shard that is not finished is dropped.
    """

    id: p.SnapshotId
    shard: int
    path: str
    is_slot: bool = False
    """Whether the path is that of the slot itself, and not a hard link that a worker has made for the upload."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """Write the manifest of a checkpoint whose shards are all in storage, and move LATEST. Then emit PublishDone.

    Failed attempts are repeated.
    """

    id: p.SnapshotId
    complete: bool


@dataclasses.dataclass(frozen=True)
class Undo:
    """Make LATEST name no state that was undone, then emit StorageSeen.

    Failed attempts are repeated, even after the end of the round. No checkpoint is published before this has succeeded.
    """

    undone: p.Undone


@dataclasses.dataclass(frozen=True)
class CollectStacks:
    """Write the whole stacks of this agent's workers to the log, then emit StacksCollected."""

    round: int


@dataclasses.dataclass(frozen=True)
class ReportChanged:
    """Send the new `report` of the AgentState to the operator, and its new `member_state` to the coordinator.

    This effect occurs at most once per event, and is the last one.
    """


@dataclasses.dataclass(frozen=True)
class UseStorage:
    """Start to use durable storage for a script's state: check storage (StorageSeen), and start the uploader."""


@dataclasses.dataclass(frozen=True)
class ProbeStorage:
    """Check what LATEST names, because the known value may be outdated. StorageSeen follows."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """Exit with this code."""

    code: int


@dataclasses.dataclass(frozen=True)
class IllegalTransition:
    """A change of state that `states.TRANSITIONS` does not allow has happened.

    This makes a test fail. An agent writes it to the log and continues, because its facts are still correct, and an
    exit would end the round.
    """

    what: str


Effect = Union[
    PersistSeen, KillWorkers, BindStore, PingPeers, Reply, StartRound, CopyFrom, DropSnapshots, SendToWorker,
    SignalWorkers, Broadcast, Ship, Publish, Undo, UseStorage, ProbeStorage, CollectStacks, ReportChanged, Exit,
    IllegalTransition,
]  # fmt: skip
