"""One agent's part in a round: being prepared for it, and taking part in it. Pure."""

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
    """What has to be true before Prepared may be said, and who waits for it."""

    prepare: p.Prepare
    asked: tuple[p.Candidate, ...]
    """Of its candidates, who is pinged (`probes`)."""
    waiting: list[int]
    left_out: bool = False
    """The round has its members, and this replica is none."""
    gone: bool = False
    store: Optional[str] = None
    reachable: Optional[tuple[str, ...]] = None
    answer: Optional[p.Prepared] = None

    @property
    def quiet(self) -> bool:
        """No worker of an older round is left, and the store is bound: an Assign may come."""
        return self.gone and self.store is not None


@dataclasses.dataclass(frozen=True)
class Notice:
    """A SIGTERM: this replica is to go."""

    at: float
    grace: float

    @property
    def until(self) -> float:
        return self.at + self.grace

    @property
    def patient_until(self) -> float:
        """When a drain that the coordinator should have begun isn't waited for any longer."""
        return self.at + min(1.0, self.grace / 4)


@dataclasses.dataclass
class ActiveDrain:
    """A drain that has begun."""

    order: p.Drain
    until: float
    """When its grace is over."""
    grace_over: bool = False


@dataclasses.dataclass
class Membership:
    """The round that this agent was assigned to."""

    assign: p.Assign
    me: int
    workers: Workers
    coordinator: Optional[Coordinator]
    """Only on the coordinator."""
    silent_at: float
    """When the coordinator counts as lost, unless it says something."""
    drain: Optional[ActiveDrain] = None
    failure: Optional[p.Failure] = None
    stopping: Stopping = dataclasses.field(default_factory=Stopping)
    """Of a command of one's own, in a drain."""
    succeeded_at: Optional[float] = None
    """When the whole round was known to have succeeded, its last checkpoint included."""
    leaving: tuple[str, ...] = ()
    """Members that have to go, as the coordinator says."""
    coordinator_gone: bool = False
    copying: bool = False
    """Its neighbour's snapshots are copied here."""
    restored: bool = False
    """Whether all ranks have what the round goes on from."""
    saved: dict[int, tuple[Committed, ...]] = dataclasses.field(default_factory=dict)
    """Own shard -> its two newest snapshots of this round, the newest first."""
    ends_at: Optional[int] = None
    """Of a script that is through on all members: the newest step that all ranks have whole, as the coordinator
    says."""
    published: Optional[p.Durable] = None
    """On the coordinator: what this round has made LATEST name."""
    copied: dict[int, int] = dataclasses.field(default_factory=dict)
    """Own shard -> newest step that the peer holds."""
    hearts: Heartbeats = dataclasses.field(default_factory=Heartbeats)
    world_mismatch: str = ""
    """How each of the own workers trains in a world of its own, in a clause; empty if one does not."""

    @property
    def lonely(self) -> bool:
        return len(self.assign.members) == 1

    @property
    def last(self) -> dict[int, Committed]:
        """Own shard -> its newest snapshot of this round."""
        return {shard: newest for shard, (newest, *_) in self.saved.items()}

    def committed(self, message: Committed) -> None:
        self.saved[message.shard] = (message, *self.saved.get(message.shard, ()))[:2]

    def saved_by_all(self) -> tuple[int, ...]:
        """Steps of the newest snapshots that each of the own workers has."""
        saved = [{each.id.step for each in self.saved.get(rank, ())} for rank in self.workers.ranks]
        return tuple(sorted(set.intersection(*saved)))

    def discount_pause(self, seconds: float) -> None:
        """This agent did not run for so long: silence is not counted by what it could not hear."""
        self.silent_at += seconds
        if self.coordinator is not None:
            self.coordinator.discount_pause(seconds)

    def fail(self, failure: p.Failure) -> None:
        self.failure = better(self.failure, failure)

    def peer_has_all(self, snapshots: SnapshotIndex) -> bool:
        """The peer holds the newest snapshot of each own shard (true where there is no peer, or no snapshot)."""
        newest = {rank: snapshots.newest(self.assign.round, rank) for rank in self.workers.ranks}
        return self.lonely or all(step is None or self.has_copied(rank, step) for rank, step in newest.items())

    def has_copied(self, shard: int, step: int) -> bool:
        """Whether the peer holds this own shard of that step, or a newer one."""
        copied = self.copied.get(shard)
        return copied is not None and copied >= step
