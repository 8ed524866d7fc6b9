"""Durable storage: parts, checkpoints and LATEST with its conditional write and its fence."""

from __future__ import annotations

import dataclasses

from concertina_agent.protocol import Durable, SnapshotId
from simulation.clock import Clock, Violation

Lineage = tuple[tuple[int, int, int], ...]
"""How a state came about: (round, steps before, steps after) for each round that trained it."""


def steps_of(lineage: Lineage) -> int:
    return lineage[-1][2] if lineage else 0


def check_lineage(lineage: Lineage) -> None:
    """The consumed positions, in order, are 0, 1, 2, ...: each round goes on where the one before stopped."""
    at, last = 0, 0
    for round, before, after in lineage:
        if before != at or after <= before or round <= last:
            raise Violation(f"positions skipped or repeated: {lineage}")
        at, last = after, round


@dataclasses.dataclass
class Storage:
    clock: Clock
    uid: str
    down_until: float = 0.0
    latest: Durable | None = None
    etag: int = 0

    def __post_init__(self) -> None:
        self.parts: dict[tuple[SnapshotId, int], Lineage] = {}
        self.checkpoints: dict[str, Lineage] = {}

    @property
    def up(self) -> bool:
        return self.clock.now >= self.down_until

    def refuses(self, id: SnapshotId) -> bool:
        """The fence: what a publisher reads off LATEST before it writes."""
        latest = self.latest
        return latest is not None and (latest.round, latest.step) > (id.round, id.step)

    def move(self, id: SnapshotId, complete: bool, etag: int) -> Durable | None:
        """The conditional write; None where LATEST has moved since it was read."""
        if etag != self.etag:
            return None
        parts = [self.parts.get((id, shard)) for shard in range(id.shards)]
        if None in parts or len(set(parts)) != 1:
            raise Violation(f"LATEST would point at a partial or mixed checkpoint: {id} {parts}")
        lineage = parts[0] or ()
        check_lineage(lineage)
        if steps_of(lineage) != id.step:
            raise Violation(f"the checkpoint of step {id.step} has trained {steps_of(lineage)} steps")
        if self.latest is not None and (self.latest.round, self.latest.step) > (id.round, id.step):
            raise Violation(f"LATEST goes back from {self.latest} to round {id.round}, step {id.step}")
        uri = f"s3://bucket/{self.uid}/round-{id.round}/step-{id.step}"
        self.checkpoints[uri] = lineage
        self.latest = Durable(self.uid, id.round, id.step, uri, complete=complete, at=self.clock.now)
        self.etag += 1
        self.clock.tell(f"LATEST: round {id.round}, step {id.step}{', complete' if complete else ''}")
        return self.latest
