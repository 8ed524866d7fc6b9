"""Requests of the operator to agents, and the answers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.records import Candidate, HeldSnapshot, Member, Restore, Storage


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Request from the operator to every candidate for a round: stop the workers of older rounds, report the state.

    A round is a period in which a fixed set of replicas trains together. A candidate is a replica that may become a
    member. The answer is Prepared or Refused.
    """

    uid: str
    round: int
    claim: str
    candidates: tuple[Candidate, ...]


class Replaced(OpenEnum):
    """Reason why a running worker process was killed at the end of a round and replaced by a new one.

    A round is a period in which a fixed set of replicas trains.
    """

    STARTING = "starting"
    """The worker has not opened its channel to the agent yet."""
    UNABLE = "unable"
    """The worker can't continue in another round: it has a GPU, or its trainer is of an earlier version."""
    STOPPED = "stopped"
    """The worker was stopped by SIGSTOP."""
    LATE = "late"
    """The worker did not leave its round in time."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Answer to Prepare: the snapshots that an agent has, and the other candidates that it can reach.

    The message Prepare asks a replica to join the next round. A round is a period in which a fixed set of replicas
    trains. From the answers, the operator chooses the members and the starting state of the round. A snapshot is a copy
    of the training state in node memory.
    """

    replica: str
    instance: str
    round: int
    claim: str
    workers: int
    store: str
    """Address host:port at which this agent would serve the c10d store of the round. The port is already bound."""
    reachable: tuple[str, ...]
    """Candidates that this agent can reach, because they answered its Ping. The agent itself is included."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    storage: Optional[Storage] = None
    unreachable: Optional[tuple[str, ...]] = None
    """Candidates that did not answer a Ping, or None if this agent sent a Ping to all candidates.

    In a large world, an agent sends a Ping only to some candidates (decision "Large jobs test only some connections").
    """
    replaced: tuple[Replaced, ...] = ()
    """Reasons why workers of the next round are new processes although earlier workers were still running.

    Each reason is listed once.
    """
    ready: bool = True
    """True if this agent can start workers at once (see `Report.ready`). False while the agent still imports PyTorch.

    Agents of earlier versions do not send this field, and count as ready.
    """


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits from spec.failurePolicy beyond which the coordinator reports a hang or a slow rank.

    The coordinator is the agent of rank 0.
    """

    hang_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """Seconds without progress of any rank after which the round counts as hung.

    If None, the limit is derived from the usual duration of a step.
    """
    straggler_factor: Annotated[Optional[float], Absent(0.0)] = None
    """Factor that makes a rank a straggler, or None to ignore stragglers.

    A rank is a straggler if its own work in a step takes at least this many times as long as the other ranks' work.
    """


@dataclasses.dataclass(frozen=True)
class JobHistory:
    """Age of the job and number of its failures when a round begins.

    A round is a period in which a fixed set of replicas trains.
    """

    seconds: float = 0.0
    """Seconds since the job started."""
    failures: int = 0
    """Number of failures so far, whatever their cause."""


MOST_IMAGES = 4
"""Maximum number of container images that an Assign lists."""


@dataclasses.dataclass(frozen=True)
class Assign:
    """Message from the operator to every member of a round: the round begins. `members[0]` is the coordinator.

    A round is a period in which a fixed set of replicas trains together. Before the operator sends the message, it
    writes the round to the job's status. The answer is Accepted or Refused.
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
    """Distinct images of the members' containers, as resolved by the nodes. They become part of the state's lineage."""
    outside: tuple[Member, ...] = ()
    """Replicas that are not members of the round, but have shards of `restore` that no member has.

    An operator with an early version 1 of the protocol does not send this field. In that case, the members have all
    shards.

    These replicas have no ranks.
    """
    living: tuple[str, ...] = ()
    """Uids of the other existing jobs of the namespace that may use the same checkpoint folder.

    If the folder's owner is a job of this namespace and is not in this list, the owner no longer exists. This job may
    then become the owner of the folder.
    """


@dataclasses.dataclass(frozen=True)
class Release:
    """Message from the operator to a departing replica: the replica may exit.

    The replica took part in Prepare, but does not join the new round. Its state is no longer needed, because the
    members have the same state, or because the round has a newer snapshot. The answer is Accepted or Refused.

    A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node
    memory.
    """

    uid: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Drain:
    """Request from the operator to the coordinator for a drain: all ranks stop after the same step.

    The coordinator is the agent of rank 0. If `durable` is set, the coordinator reports the state `drained` only when a
    checkpoint of that step is in storage. A job without storage has no checkpoint. If all members of such a job must
    depart, their agents keep running until the grace period ends. During this time, the new replicas of the job can
    fetch the state from the memory of these agents.
    """

    uid: str
    round: int
    claim: str
    reason: str
    durable: bool
    grace_seconds: float


@dataclasses.dataclass(frozen=True)
class Save:
    """Request from the operator to the coordinator to make a checkpoint of the state after the next step.

    The answer is Accepted or Refused.

    The coordinator is the agent of rank 0.
    """

    uid: str
    round: int
    claim: str
    request: str
    """Id of a user's request for a checkpoint. A repeated request has no effect."""


@dataclasses.dataclass(frozen=True)
class Relay:
    """Request from the operator to an agent to pass a Prepare, an Assign or a Release on to other replicas.

    If the agent's own replica is in `to`, the agent also carries out the message itself. The agent answers with one
    Relayed for each replica in `to`, in the order in which the replicas' answers arrive.

    The operator may send a Relay on the connection of a Watch. The answers then arrive between the lines of the stream,
    and other requests on the connection do not wait for them.
    """

    uid: str
    line: str
    """Message to pass on, as a line of the protocol without its newline."""
    to: tuple[Candidate, ...]
    request: int = 0
    """Number that the answers repeat, so that a late answer to an earlier Relay is recognized."""


@dataclasses.dataclass(frozen=True)
class Relayed:
    """Answer to a message that an agent has passed on to another replica, with the name of that replica."""

    replica: str
    line: str = ""
    """Answer of the agent as a line of the protocol, or "" if the agent did not answer."""
    error: str = ""
    """Reason why there is no answer, as a sentence."""
    request: int = 0
    """Number of the Relay that this message answers."""


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Answer to a request that an agent has accepted."""

    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """Answer to a request that an agent has refused.

    `round` and `claim` are those of the latest request that the answering agent has seen. A claim is the operator's
    decision to begin a round.

    A round is a period in which a fixed set of replicas trains.
    """

    reason: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Watch:
    """Request from the operator to an agent for a stream of Reports.

    If `changes` is set, the stream may consist of one Report and then ReportChanges, which are smaller.
    """

    uid: str
    changes: bool = False
    """True if the stream may continue with ReportChanges.

    If so, changes that affect only numbers are sent at most once in `pace` seconds.
    """
    pace: float = 1.0
    idle_beat: float = 1.0
    """Maximum seconds between two lines to the operator if nothing changes and the agent takes part in no round.

    During a round, the maximum is REPORT_SECONDS.
    """
    coordinator: str = ""
    """Address of the coordinator's agent, or "" if there is none.

    If an agent does not know which modules the script imports, the agent requests their names from the coordinator.
    Until the agent has the names, it reports that it is not ready.
    """
