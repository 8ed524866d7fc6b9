"""One agent's part in a round: its preparation and its membership. The module has no side effects."""

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
    """Conditions for the answer Prepared, and the requests that wait for it."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Candidates that are pinged (see `probes`)."""
    waiting: list[int]
    released: bool = False
    """Whether this replica is not a member of the round, which does not need its state either (`p.Release`)."""
    gone: bool = False
    replaced: tuple[p.Replaced, ...] = ()
    """Reasons why workers are new processes, as in Prepared."""
    store: Optional[str] = None
    reachable: Optional[tuple[str, ...]] = None
    answer: Optional[p.Prepared] = None

    @property
    def quiet(self) -> bool:
        """Whether no worker of an older round is left and the store is bound, so that an Assign is accepted."""
        return self.gone and self.store is not None


@dataclasses.dataclass(frozen=True)
class Notice:
    """SIGTERM: this replica must end."""

    at: float
    grace: float

    @property
    def until(self) -> float:
        return self.at + self.grace

    @property
    def patient_until(self) -> float:
        """Time until which this agent waits for the coordinator to begin a drain."""
        return self.at + min(1.0, self.grace / 4)


@dataclasses.dataclass
class ActiveDrain:
    """Drain that has begun."""

    order: p.Drain
    until: float
    """Time at which its grace period is over."""
    grace_over: bool = False


@dataclasses.dataclass
class Membership:
    """Round that this agent was assigned to."""

    assign: p.Assign
    me: int
    workers: Workers
    coordinator: Optional[Coordinator]
    """State of the coordinator, or None on other members."""
    silent_at: float
    """Time at which the coordinator counts as lost, unless it sends a line."""
    drain: Optional[ActiveDrain] = None
    failure: Optional[p.Failure] = None
    stopping: Stopping = dataclasses.field(default_factory=Stopping)
    """State of a drain of a user's own command."""
    succeeded_at: Optional[float] = None
    """Time at which the whole round was known to have succeeded, including its last checkpoint."""
    leaving: tuple[str, ...] = ()
    """Members that have to leave, as the coordinator says."""
    coordinator_gone: bool = False
    copying: bool = False
    """Whether the neighbour's snapshots are copied here."""
    restored: bool = False
    """Whether all ranks have restored the state that the round begins with."""
    saved: dict[int, tuple[Committed, ...]] = dataclasses.field(default_factory=dict)
    """The two newest snapshots of this round by own shard, the newest first."""
    ends_at: Optional[int] = None
    """Newest step that all ranks have completely, as the coordinator says.

    This step is set once a script has finished on all members.
    """
    published: Optional[p.Durable] = None
    """Checkpoint that LATEST names because of this round; set on the coordinator."""
    copied: dict[int, int] = dataclasses.field(default_factory=dict)
    """Newest step that the peer holds, by own shard."""
    hearts: Heartbeats = dataclasses.field(default_factory=Heartbeats)
    world_mismatch: str = ""
    """Clause that says how each own worker trains in a world of its own, or empty if one worker does not."""

    @property
    def lonely(self) -> bool:
        return len(self.assign.members) == 1

    @property
    def last(self) -> dict[int, Committed]:
        """Newest snapshot of this round by own shard."""
        return {shard: newest for shard, (newest, *_) in self.saved.items()}

    def committed(self, message: Committed) -> None:
        self.saved[message.shard] = (message, *self.saved.get(message.shard, ()))[:2]

    def saved_by_all(self) -> tuple[int, ...]:
        """Return the steps of the newest snapshots that each of the own workers has."""
        saved = [{committed.id.step for committed in self.saved.get(rank, ())} for rank in self.workers.ranks]
        return tuple(sorted(set.intersection(*saved)))

    def discount_pause(self, seconds: float) -> None:
        """Extend deadlines by a time in which this agent did not run, and so could not receive messages."""
        self.silent_at += seconds
        if self.coordinator is not None:
            self.coordinator.discount_pause(seconds)

    def fail(self, failure: p.Failure) -> None:
        self.failure = better(self.failure, failure)

    def peer_has_all(self, snapshots: SnapshotIndex) -> bool:
        """Return whether the peer holds the newest snapshot of each own shard.

        The result is True if there is no peer, or no snapshot.
        """
        newest = {rank: snapshots.newest(self.assign.round, rank) for rank in self.workers.ranks}
        return self.lonely or all(step is None or self.has_copied(rank, step) for rank, step in newest.items())

    def has_copied(self, shard: int, step: int) -> bool:
        """Return whether the peer holds this own shard of that step, or a newer one."""
        copied = self.copied.get(shard)
        return copied is not None and copied >= step
