"""What plan() gives back: `Plan` is everything that should follow from what it was given. Data only.

The shell (`concertina.controller.reconcile`) applies a Plan in this order:
  1. the status, in one JSON patch that tests the job's uid and the `status.world.claim` that was observed; where that
     test fails nothing else is done, and the job is observed and planned again;
  2. calls to agents, which run in the background;
  3. the watch streams: those of `Plan.watch` are opened, all others of the job closed;
  4. the events;
  5. creates and deletes, in the background, some at a time (`concertina.controller.writes`): no pass waits for one,
     none for another, and what is still to be done then is planned again.
So a claim is written before any Prepare of it is sent, and a commit before any Assign; and a job recovers whatever
becomes of its pods' creation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import concertina_protocol as protocol
from concertina.api.status import JobStatus


@dataclass(frozen=True)
class CreateSecret:
    pass


@dataclass(frozen=True)
class Rendezvous:
    """What a member's torchrun is told, with `launcher: Torchrun`."""

    address: str
    """host:port of the store."""
    round: int
    least: int
    """Replicas without which it does not start."""


@dataclass(frozen=True)
class CreatePod:
    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    """Preferably not there."""
    never_nodes: tuple[str, ...] = ()
    """By no means there: others have room."""
    standby: bool = False
    """It is to stand by: preferably on a node without any other replica of the job."""
    snapshot_memory: int | None = None
    """Bytes that the bundled trainer's snapshots may take, at most; None: nothing bounds them."""
    rendezvous: Rendezvous | None = None
    """None where agents run in the pods."""


@dataclass(frozen=True)
class CreateRendezvous:
    """The pod that serves torchrun's store."""

    round: int


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    reason: str
    force: bool = False
    """Grace 0: the node is out of service, or does not answer and the pod is fenced out."""


@dataclass(frozen=True)
class EndPod:
    """Its containers are stopped; the pod has failed then, and stays with its logs."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True)
class DeleteJob:
    """TTL after the end has passed."""


@dataclass(frozen=True)
class Send:
    """A call to one agent. One of the same kind, round and claim that is under way or answered is not sent twice; one
    that failed (Call.error) is sent again, and so is a Drain that is durable now. The Call stands in the AgentView from
    the moment it is sent."""

    replica: str
    address: str
    message: protocol.Prepare | protocol.Assign | protocol.Drain | protocol.Save


Action = CreateSecret | CreatePod | CreateRendezvous | DeletePod | EndPod | DeleteJob | Send


@dataclass(frozen=True)
class Event:
    type: str
    """Normal or Warning."""
    reason: str
    message: str


class SpanName(enum.StrEnum):
    """Of a round's trace; those of a start are the words of `Progress.timeline`."""

    ROUND = "round"
    """All of it, from the end of training (or from the claim) to the first step."""
    DETECT = "detect"
    DRAIN = "drain"
    DECIDE = "decide"
    PREPARE = "prepare"
    PREPARE_MEMBER = "prepare member"
    ASSIGN = "assign"
    START = "start"
    GROUP = "group"
    BUILD = "build"
    RESTORE = "restore"
    FIRST_STEP = "first_step"


@dataclass(frozen=True)
class Span:
    name: SpanName
    begin: float
    end: float
    """Unix seconds by this operator's clock, no earlier than `begin`."""
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str = ""
    """What went wrong, in a sentence; empty where nothing did."""


@dataclass(frozen=True)
class RoundTrace:
    round: int
    root: Span


@dataclass(frozen=True)
class Plan:
    status: JobStatus
    actions: tuple[Action, ...] = ()
    watch: Mapping[str, str] = field(default_factory=dict)
    """Replica to address: the streams that should be open."""
    events: tuple[Event, ...] = ()
    recheck_after: float | None = None
    """Seconds until the job must be planned again even if nothing happens."""
    trace: RoundTrace | None = None
    """Of the round that is under way, or given up, from now on."""
    only_numbers: bool = False
    """Whether its status is another one by numbers and sentences alone: a pass over it would decide the same."""
    silent: tuple[str, ...] = ()
    """Uids of pods that nothing but their silence speaks against, the longest silent first. The shell limits how many
    of them are given up (`JobObservation.given_up`)."""
    only_conditions: bool = False
    """Whether nothing but conditions and numbers of its status is other than it was: no action waits for that write."""
