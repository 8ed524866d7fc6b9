"""Events that an agent receives, and effects that it must carry out.

The module contains only data; `machine` contains the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

import concertina_protocol as p
from concertina_protocol import worker_channel as w


class Moment(NamedTuple):
    """Time at which an event is handled."""

    now: float
    """Monotonic time in seconds."""
    at: float
    """Unix time in seconds, used only in output for people (Failure.at)."""


# --- events ---------------------------------------------------------------------------------------------------------

Request = Union[p.Prepare, p.Assign, p.Release, p.Drain, p.Save, p.Join, p.Ping, p.Trace]


@dataclasses.dataclass(frozen=True)
class RequestReceived:
    """Request over the wire, which is answered by exactly one Reply with the same `request` number, possibly later."""

    request: int
    message: Request


@dataclasses.dataclass(frozen=True)
class WorkersGone:
    """Answer to KillWorkers: no worker is in a lower round any more, and the volume has been read since."""

    round: int
    held: Optional[tuple[p.HeldSnapshot, ...]] = None
    """Snapshots in the volume. If None, the core's own record applies (a worker leaves its newest three complete)."""
    replaced: tuple[p.Replaced, ...] = ()
    """Reason for each worker that had not ended and was killed, because it can't enter the next round."""


@dataclasses.dataclass(frozen=True)
class StoreBound:
    """Answer to BindStore."""

    round: int
    claim: str
    address: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """Answer to PingPeers: the candidates that answered a Ping, including this agent."""

    prepare: p.Prepare
    replicas: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StartFailed:
    """Failure to start the workers of this round."""

    round: int
    message: str


@dataclasses.dataclass(frozen=True)
class WorkerMessage:
    """Message of a worker.

    `message` is one of Hello, Progress, Beat, Committed, WantDurable, Done, Fault, KeepsState, Register and CallCount.


    For a user's own command, the shell sends Hello when the process has started.
    """

    round: int
    rank: int
    message: w.Message


@dataclasses.dataclass(frozen=True)
class WorkerExited:
    """End of a worker, after its last WorkerMessage; `code` is negative for a signal, as in `subprocess`."""

    round: int
    rank: int
    code: int
    last_lines: tuple[str, ...] = ()
    last_error: str = ""
    """Last line of stderr. If stdout is buffered, its lines come last although they were printed first."""
    out_of_memory: bool = False
    """Whether the kernel has killed a process of this container for lack of memory since the worker started."""


@dataclasses.dataclass(frozen=True)
class MemberMessage:
    """Line on the stream that this member's accepted Join opened."""

    state: p.MemberState


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """Loss of a member: its stream broke and its agent could not be reached, or it sent an invalid message."""

    round: int
    claim: str
    replica: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class CoordinatorJoined:
    """Acceptance of this agent's Join: the first one, or another one after the stream broke."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class CoordinatorMessage:
    """Line of the coordinator: Drain, StopAt, DurableMoved, or a heartbeat (MemberState)."""

    round: int
    claim: str
    message: Union[p.Drain, p.StopAt, p.DurableMoved, p.MemberState]


@dataclasses.dataclass(frozen=True)
class CoordinatorGone:
    """Loss of the coordinator: its stream broke and stayed broken, or it refused this agent's Join permanently."""

    round: int
    claim: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class PeerCopied:
    """Confirmation that the next member holds this shard of this agent."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class CopyHeld:
    """Confirmation that this agent holds this shard of the previous member."""

    id: p.SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class PartShipped:
    """Answer to Ship: the shard is in durable storage."""

    part: p.Part


@dataclasses.dataclass(frozen=True)
class PublishDone:
    """Answer to Publish: `durable` is what LATEST names now, or None if the fence refused the snapshot permanently."""

    id: p.SnapshotId
    durable: Optional[p.Durable]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class StorageSeen:
    """News about durable storage."""

    storage: p.Storage


@dataclasses.dataclass(frozen=True)
class TrackingSeen:
    """News about the tracker."""

    trouble: str
    """Reason why the tracker does not accept records, in a sentence, or empty if it does."""


@dataclasses.dataclass(frozen=True)
class Warm:
    """Result of the warm-up: workers can start at once from now on, or never if `error` is set."""

    error: str = ""


@dataclasses.dataclass(frozen=True)
class Learning:
    """Begin or end of a request to another replica for modules to import before workers start."""

    under_way: bool


@dataclasses.dataclass(frozen=True)
class WarmStartKnown:
    """Work that a user's own command repeats at each start although a warm start is requested.

    It replaces the previous such event.
    """

    warm_start_disabled_reason: str = ""
    """Reason why the command is not started warm at all."""
    warm_start_skipped_modules: str = ""
    """Modules that the command has to import itself, with the reasons."""


@dataclasses.dataclass(frozen=True)
class WorldsSeen:
    """Result of a check whether each worker of this round trains in a separate world."""

    round: int
    mismatch: str
    """Clause that says how each worker trains in a world of its own, or empty if one worker does not."""


@dataclasses.dataclass(frozen=True)
class TerminationNotice:
    """SIGTERM: this pod must end within `grace` seconds."""

    grace: float


@dataclasses.dataclass(frozen=True)
class StepCount:
    """Optimizer steps that a script's process has made, counted by a hook of torch."""

    rank: int
    steps: int
    """Number of steps since the process started, at least 1."""
    first_at: float
    """Time of the first step in Unix seconds."""
    seconds: float
    """Duration of the last step in seconds, or 0 before the second one."""
    optimizer: str
    """Class of the optimizer whose steps are counted."""
    still: float
    """Seconds since an optimizer last stepped."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """Passage of time, a few times a second."""

    heartbeats: tuple[p.Heartbeat, ...] = ()
    """Heartbeats of own workers that write one."""
    stopped: tuple[tuple[int, int], ...] = ()
    """Ranks of own workers that are stopped (SIGSTOP), and the CPU time that each has used."""
    counts: tuple[StepCount, ...] = ()
    """Counted optimizer steps of own workers."""


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
    """Write the highest round to the volume durably before WorkersGone of this round is emitted.

    Until then, nothing is answered and nothing starts.
    """

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class KillWorkers:
    """Leave everything older than `round`, then emit WorkersGone(round).

    Workers that stay leave their round; this kills (SIGKILL) and reaps all others, and ends the store, the copier,
    shipping and the streams (both to the coordinator and of members). The effect is repeated if a kill is requested
    again.
    """

    round: int


@dataclasses.dataclass(frozen=True)
class BindStore:
    """Bind a store, then emit StoreBound."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class PingPeers:
    """Ping candidates with a short timeout, then emit Reached."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Candidates to ping, including this agent (see `probes`)."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """Send the answer to a request."""

    request: int
    message: Union[p.Prepared, p.Accepted, p.Refused]


@dataclasses.dataclass(frozen=True)
class StartRound:
    """Start the workers of members[me].

    If `coordinator`, serve the bound store. Otherwise, close it and join the coordinator (members[0]), repeatedly until
    it accepts or the round is over.
    """

    assign: p.Assign
    me: int

    @property
    def coordinator(self) -> bool:
        return self.me == 0


@dataclasses.dataclass(frozen=True)
class CopyFrom:
    """Copy every snapshot of these shards of this round as that member commits it; emit CopyHeld after each."""

    round: int
    member: p.Member
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DropSnapshots:
    """Delete these snapshots, and shards that were fetched from peers, because no worker asks for them any more."""

    ids: tuple[p.SnapshotId, ...]


@dataclasses.dataclass(frozen=True)
class SendToWorker:
    """Send a message to a worker."""

    rank: int
    message: Union[w.DrainRequest, w.SaveNow, w.TraceSteps, w.CopiedUpTo, w.Registered, w.QueryCalls, w.StopAtCall]


@dataclasses.dataclass(frozen=True)
class SignalWorkers:
    """Send a signal to the process group of every worker of the round that still exists."""

    signal: int


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Send a message from the coordinator on the streams of this round, or to the replica `only`."""

    message: Union[p.Drain, p.StopAt, p.DurableMoved]
    only: str = ""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Put the file into storage, with retries, until it is there (PartShipped) or the round is over.

    An earlier one of the same shard is dropped.
    """

    id: p.SnapshotId
    shard: int
    path: str
    is_slot: bool = False
    """Whether the path is the slot's own, and not a second name that a worker has created for shipping."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """Write the manifest and move LATEST, with retries, because all parts are in storage; then emit PublishDone."""

    id: p.SnapshotId
    complete: bool


@dataclasses.dataclass(frozen=True)
class Undo:
    """Make LATEST name nothing that was undone, with retries, then emit StorageSeen.

    This write precedes any other publication, and happens even if the round ends.
    """

    undone: p.Undone


@dataclasses.dataclass(frozen=True)
class CollectStacks:
    """Write the complete stacks of all own workers to the log, then emit StacksCollected."""

    round: int


@dataclasses.dataclass(frozen=True)
class ReportChanged:
    """Send the new report() and member_state() of the AgentState to the watchers and the coordinator.

    The effect occurs at most once per event, and last.
    """


@dataclasses.dataclass(frozen=True)
class UseStorage:
    """Start to use durable storage for a script's state: check it (StorageSeen), and prepare to write."""


@dataclasses.dataclass(frozen=True)
class ProbeStorage:
    """Check LATEST, because the known LATEST may be outdated; StorageSeen follows."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """Exit the agent with this code."""

    code: int


@dataclasses.dataclass(frozen=True)
class IllegalTransition:
    """Transition that `states.TRANSITIONS` does not contain.

    Tests fail with it. An agent logs it and continues, because its facts are as true as before, and its end would cost
    a round.
    """

    what: str


Effect = Union[
    PersistSeen, KillWorkers, BindStore, PingPeers, Reply, StartRound, CopyFrom, DropSnapshots, SendToWorker,
    SignalWorkers, Broadcast, Ship, Publish, Undo, UseStorage, ProbeStorage, CollectStacks, ReportChanged, Exit,
    IllegalTransition,
]  # fmt: skip
