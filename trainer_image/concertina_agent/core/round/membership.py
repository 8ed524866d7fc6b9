"""An agent's part in a round, which is a period in which a fixed set of replicas trains together.

Preparation records what happens before the round begins, and Membership what happens in the round. The module has no
side effects.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

import concertina_protocol as p
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.failures import better
from concertina_agent.core.round.stopping import Stopping
from concertina_agent.core.round.watchdog import Heartbeats
from concertina_agent.core.round.workers_state import Workers
from concertina_agent.core.snapshot_index import SnapshotIndex
from concertina_protocol.worker_channel import Committed


@dataclasses.dataclass
class Preparation:
    """Preparation of this agent for a round.

    This class records what must happen before the agent answers Prepared, and which requests wait for that answer.

    A round is a period in which a fixed set of replicas trains.
    """

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Candidates that get a Ping (see `probes`)."""
    waiting: list[int]
    released: bool = False
    """True if the operator has sent Release: the replica does not become a member, and its state is not needed."""
    gone: bool = False
    replaced: tuple[p.Replaced, ...] = ()
    """Reasons why the workers of the round are new processes (see `Prepared.replaced`)."""
    store: Optional[str] = None
    reachable: Optional[tuple[str, ...]] = None
    answer: Optional[p.Prepared] = None

    @property
    def quiet(self) -> bool:
        """True if nothing prevents this agent from beginning the round.

        All workers of older rounds must have ended, and a port must be bound for the round's c10d store, at which the
        ranks rendezvous.
        """
        return self.gone and self.store is not None


@dataclasses.dataclass(frozen=True)
class Notice:
    """Termination notice: this replica has received SIGTERM, and its pod will end."""

    at: float
    grace: float

    @property
    def until(self) -> float:
        return self.at + self.grace

    @property
    def patient_until(self) -> float:
        """Time until which an agent with a termination notice waits for the coordinator to begin a drain.

        In a drain, all ranks save and stop after the same step. If no drain has begun by that time, this agent stops
        its own workers.

        The coordinator is the agent of rank 0.
        """
        return self.at + min(1.0, self.grace / 4)


@dataclasses.dataclass
class ActiveDrain:
    """Drain that is in progress: all ranks are saving their state, to stop after the same step."""

    order: p.Drain
    until: float
    """Time at which the grace period of the drain ends."""
    grace_over: bool = False


@dataclasses.dataclass
class Membership:
    """Facts about a round (training by a fixed set of replicas) of which this agent is a member.

    The message Prepare asks a replica to join the next round. The object is created at the operator's Assign of the
    round, and is discarded at the Prepare of the next round.
    """

    assign: p.Assign
    me: int
    workers: Workers
    coordinator: Optional[Coordinator]
    """State of the coordinator if this agent is the coordinator, otherwise None."""
    silent_at: float
    """Time at which the coordinator counts as lost if it sends no further line."""
    drain: Optional[ActiveDrain] = None
    failure: Optional[p.Failure] = None
    stopping: Stopping = dataclasses.field(default_factory=Stopping)
    """State of the agreement on the call of should_checkpoint() at which a user's own command stops."""
    succeeded_at: Optional[float] = None
    """Time at which the whole round, including its last checkpoint, was known to have succeeded, or None."""
    leaving: tuple[str, ...] = ()
    """Members that must depart, as the coordinator has reported."""
    coordinator_gone: bool = False
    copying: bool = False
    """True if this agent copies the snapshots of its neighbour."""
    restored: bool = False
    """True if all ranks have restored the state with which the round began."""
    saved: dict[int, tuple[Committed, ...]] = dataclasses.field(default_factory=dict)
    """The two newest snapshots of this round for each shard of this agent's workers, the newest first."""
    ends_at: Optional[int] = None
    """Newest step that all ranks have completely, as the coordinator has reported.

    The field is set when a script has finished on all members.
    """
    published: Optional[p.Durable] = None
    """Checkpoint that LATEST names because this round has published it, or None. Only the coordinator sets this."""
    copied: dict[int, int] = dataclasses.field(default_factory=dict)
    """Newest step of which another replica has a copy, for each shard of this agent's workers."""
    hearts: Heartbeats = dataclasses.field(default_factory=Heartbeats)
    world_mismatch: str = ""
    """Part of a sentence that says how each worker of this agent trains in a world of its own, or "" unless all do."""

    @property
    def lonely(self) -> bool:
        return len(self.assign.members) == 1

    @property
    def last(self) -> dict[int, Committed]:
        """Newest snapshot in this round of each shard that this agent's workers save, keyed by shard number."""
        return {shard: newest for shard, (newest, *_) in self.saved.items()}

    def committed(self, message: Committed) -> None:
        self.saved[message.shard] = (message, *self.saved.get(message.shard, ()))[:2]

    def saved_by_all(self) -> tuple[int, ...]:
        """Return the steps whose snapshots every worker of this agent has saved.

        Only the last few snapshots of each worker are known.
        """
        saved = [{committed.id.step for committed in self.saved.get(rank, ())} for rank in self.workers.ranks]
        return tuple(sorted(set.intersection(*saved)))

    def discount_pause(self, seconds: float) -> None:
        """Move all deadlines back by `seconds`, the time for which this agent's process was suspended.

        A suspended process can't receive messages. Other agents were therefore not silent during this time.
        """
        self.silent_at += seconds
        if self.coordinator is not None:
            self.coordinator.discount_pause(seconds)

    def fail(self, failure: p.Failure) -> None:
        self.failure = better(self.failure, failure)

    def peer_has_all(self, snapshots: SnapshotIndex) -> bool:
        """Return whether another replica has a copy of the newest snapshot of every shard of this agent's workers.

        The result is also True if no replica keeps copies for this agent, or if no worker has saved a snapshot.
        """
        newest = {rank: snapshots.newest(self.assign.round, rank) for rank in self.workers.ranks}
        return self.lonely or all(step is None or self.has_copied(rank, step) for rank, step in newest.items())

    def has_copied(self, shard: int, step: int) -> bool:
        """Return whether another replica has a copy of this agent's shard `shard` of step `step` or a later step."""
        copied = self.copied.get(shard)
        return copied is not None and copied >= step
