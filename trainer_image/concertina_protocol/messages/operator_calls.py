"""Requests of the operator to agents, and the answers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.records import Candidate, HeldSnapshot, Member, Restore, Storage


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Request from the operator to every candidate to stop older rounds and report its state.

    The answer is Prepared or Refused.
    """

    uid: str
    round: int
    claim: str
    candidates: tuple[Candidate, ...]


class Replaced(OpenEnum):
    """Reason why a new process takes the place of a worker that has not ended."""

    STARTING = "starting"
    """It has not opened its channel yet."""
    UNABLE = "unable"
    """It can't stay: it has a GPU, or its trainer is of an earlier version."""
    STOPPED = "stopped"
    """It is stopped (SIGSTOP)."""
    LATE = "late"
    """It has not left its round in time."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Answer to Prepare."""

    replica: str
    instance: str
    round: int
    claim: str
    workers: int
    store: str
    """host:port at which this agent would serve the c10d store of this round. The port is already bound."""
    reachable: tuple[str, ...]
    """Candidates that answered this agent's Ping, including the agent itself."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    storage: Optional[Storage] = None
    unreachable: Optional[tuple[str, ...]] = None
    """Candidates that did not answer, if only some were asked, or None if all were asked.

    See decision "A large world is probed in part".
    """
    replaced: tuple[Replaced, ...] = ()
    """Reasons, each once, why next workers of this replica are new processes although the old ones had not ended."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits that the coordinator checks, from spec.failurePolicy."""

    hang_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """Time without progress of any rank after which the round hangs. If None, it follows from the usual step time."""
    straggler_factor: Annotated[Optional[float], Absent(0.0)] = None
    """Factor from which a rank is a straggler, or None to look for none.

    A straggler's own work in a step takes at least this many times as long as that of the other ranks.
    """


@dataclasses.dataclass(frozen=True)
class JobHistory:
    """History of the job when a round begins."""

    seconds: float = 0.0
    """Seconds since the job's start."""
    failures: int = 0
    """Number of failures, of any cause."""


MOST_IMAGES = 4
"""Maximum number of images that an Assign names."""


@dataclasses.dataclass(frozen=True)
class Assign:
    """Message from the operator to every member after the commit; members[0] is the coordinator.

    The answer is Accepted or Refused.
    """

    uid: str
    round: int
    claim: str
    members: tuple[Member, ...]
    store: str
    restore: Restore
    limits: Limits = Limits()
    history: JobHistory = JobHistory()
    images: tuple[str, ...] = ()
    """Distinct images of the members' containers, as resolved by their nodes, for the lineage of the trained state."""
    outside: tuple[Member, ...] = ()
    """Replicas that are not members and hold shards of `restore` that no member holds. They have no ranks.

    An early version 1 did not send this field. Members held every shard then.
    """
    living: tuple[str, ...] = ()
    """UIDs of the other live jobs of this namespace that may use the same checkpoint folder.

    If the folder's owner was a job of this namespace and is not in this list, it no longer exists, and this job may
    take over the folder.
    """


@dataclasses.dataclass(frozen=True)
class Release:
    """Message from the operator to a leaving replica that was prepared for a round and is not a member of it.

    The replica no longer has to stay for the state that it holds: the members hold it, or the round has a newer
    snapshot. The answer is Accepted or Refused.
    """

    uid: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Drain:
    """Request from the operator to the coordinator to stop all ranks after the same step.

    If `durable` is set, a checkpoint must be in storage before the state becomes `drained`. In a job without storage, a
    world that leaves as a whole then stays for its grace period, because successors may fetch its state.
    """

    uid: str
    round: int
    claim: str
    reason: str
    durable: bool
    grace_seconds: float


@dataclasses.dataclass(frozen=True)
class Save:
    """Request from the operator to the coordinator to make the state after the next step durable.

    The answer is Accepted or Refused.
    """

    uid: str
    round: int
    claim: str
    request: str
    """Identity of a user's request. The same request again changes nothing."""


@dataclasses.dataclass(frozen=True)
class Relay:
    """Request from the operator to any agent to pass a Prepare, an Assign or a Release on to others.

    The agent also applies the message itself if it is among them. The answer is one Relayed for each candidate in `to`,
    in the order in which they answer.
    """

    uid: str
    line: str
    """Message as on the wire, without its newline."""
    to: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Relayed:
    """Answer of one agent to a relayed message."""

    replica: str
    line: str = ""
    """Answer as received, or empty if the agent could not be asked."""
    error: str = ""
    """Reason why the agent could not be asked, in a sentence."""


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Answer to a request that is accepted."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """Answer to a request that is refused; `round` and `claim` are the highest that this agent has seen."""

    reason: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Watch:
    """Request from the operator to any agent for a stream of Reports, or of a Report followed by ReportChanges."""

    uid: str
    changes: bool = False
    """Whether the stream may continue with ReportChanges. Changes of mere numbers are sent every `pace` seconds."""
    pace: float = 1.0
    idle_beat: float = 1.0
    """Longest time in seconds between two lines of an unchanged agent in no round; in a round, it is REPORT_SECONDS."""
    coordinator: str = ""
    """Address of a round's coordinator, if there is one.

    An agent that does not know which modules the script imports asks the coordinator for them, and is not ready before.
    """
