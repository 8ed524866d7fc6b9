"""What the operator asks of agents, and their answers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent
from concertina_protocol.messages.records import Candidate, HeldSnapshot, Member, Restore, Storage


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Operator to every candidate: stop what is older, say what you have. Answer: Prepared or Refused."""

    uid: str
    round: int
    claim: str
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Prepared:
    replica: str
    instance: str
    round: int
    claim: str
    workers: int
    store: str
    """host:port at which this agent would serve the c10d store of this round (already bound)."""
    reachable: tuple[str, ...]
    """Candidates, itself included, that answered this agent's Ping."""
    snapshots: tuple[HeldSnapshot, ...] = ()
    storage: Optional[Storage] = None
    unreachable: Optional[tuple[str, ...]] = None
    """Candidates that did not, where only some were asked (decision "A large world is probed in part"); None: all were
    asked."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the coordinator looks out for, from spec.failurePolicy."""

    hang_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """The round hangs when no rank moves for so long; None: by the usual step time."""
    straggler_factor: Annotated[Optional[float], Absent(0.0)] = None
    """A rank whose own work in a step takes so many times the others' is a straggler; None: none is looked for."""


@dataclasses.dataclass(frozen=True)
class JobHistory:
    """Of the job, when a round begins."""

    seconds: float = 0.0
    """Since its start."""
    failures: int = 0
    """Whatever their cause."""


MOST_IMAGES = 4
"""That an Assign names."""


@dataclasses.dataclass(frozen=True)
class Assign:
    """Operator to every member, after the commit; also to those with a notice that were asked and are none: they need
    not stay for what they hold. Answer: Accepted or Refused. members[0] is the coordinator."""

    uid: str
    round: int
    claim: str
    members: tuple[Member, ...]
    store: str
    restore: Restore
    limits: Limits = Limits()
    history: JobHistory = JobHistory()
    images: tuple[str, ...] = ()
    """Of the members' containers, as their nodes resolved them, each once: for the lineage of what is trained."""
    outside: tuple[Member, ...] = ()
    """Who is no member, and holds shards of `restore` that no member does: without ranks. (Version 1 did not say it at
    first: then no member could have them.)"""
    living: tuple[str, ...] = ()
    """Uids of the other live jobs of this namespace that may use the same folder of checkpoints. An owner of the folder
    that was a job of this namespace and is none of these is gone: this job may take over."""


@dataclasses.dataclass(frozen=True)
class Drain:
    """Operator to the coordinator: stop after the same step. `durable`: a checkpoint must be in storage before
    `drained`; in a job without storage, a world that leaves as a whole then stays for its grace: successors may come
    for its state."""

    uid: str
    round: int
    claim: str
    reason: str
    durable: bool
    grace_seconds: float


@dataclasses.dataclass(frozen=True)
class Save:
    """Operator to the coordinator: make the state after the next step durable. Answer: Accepted or Refused."""

    uid: str
    round: int
    claim: str
    request: str
    """Which request of a person this is: the same again changes nothing."""


@dataclasses.dataclass(frozen=True)
class Relay:
    """Operator to any agent: pass a Prepare or an Assign on to others, and take it yourself where you are among them.
    Answer: a Relayed for each of `to`, in the order of their answers."""

    uid: str
    line: str
    """The message as on the wire, without its end of line."""
    to: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Relayed:
    replica: str
    line: str = ""
    """Its answer as it came; empty where it could not be asked."""
    error: str = ""
    """Why not, in a sentence."""


@dataclasses.dataclass(frozen=True)
class Accepted:
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """`round` and `claim` are the highest this agent has seen."""

    reason: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Watch:
    """Operator to any agent: a stream of Report, or of a Report and ReportChanges after it."""

    uid: str
    changes: bool = False
    """Whether the stream may go on with ReportChanges, and with those of mere numbers every `pace` seconds."""
    pace: float = 1.0
    idle_beat: float = 1.0
    """Seconds between two lines of an agent in no round, where nothing is new; else it is REPORT_SECONDS."""
    coordinator: str = ""
    """The address of a round's coordinator, where there is one: an agent that does not know what the script imports
    asks it, and is not ready before."""
