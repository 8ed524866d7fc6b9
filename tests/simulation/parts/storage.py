"""Durable storage: parts, checkpoints and LATEST with its conditional write and its fence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from concertina_protocol import Durable, SnapshotId, Undone
from concertina_protocol.messages.undone import joined
from simulation.parts.clock import Clock, Violation
from simulation.parts.lineage import FRESH, Lineage, check_lineage, steps_of


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
        self.undone: tuple[Undone, ...] = ()
        """States that LATEST declares undone."""
        self._told: list[Undone] = []
        self._finished: dict[tuple[int, int], Durable] = {}

    @property
    def up(self) -> bool:
        return self.clock.now >= self.down_until

    def refuses(self, id: SnapshotId) -> bool:
        """Return why a publication is refused by the fence, which a publisher reads from LATEST before it writes."""
        latest = self.latest
        return self.voids(id) or (latest is not None and (latest.round, latest.step) > (id.round, id.step))

    def voids(self, id: SnapshotId) -> bool:
        """Return whether LATEST declares that this state was undone."""
        return any(some.covers(id.round, id.step) for some in self.undone)

    def undo(self, undone: Undone) -> Durable | None:
        """Undo states as `storage.rollback.undo` does, by one conditional write; return what LATEST then names."""
        void = joined(self.undone, undone)
        if void == self.undone or (self.latest and self.latest.round > undone.round):
            return self.latest
        self.undone, self.etag = void, self.etag + 1
        self._told.append(undone)
        if self.latest is not None and undone.covers(self.latest.round, self.latest.step):
            self.latest = self._newest(void)
            self.clock.tell(f"LATEST goes back to {self.latest and self.latest.uri}: undone is {undone}")
        return self.latest

    def go_back(self, undone: Iterable[Undone]) -> Durable | None:
        """Return what `storage.rollback.go_back` would return."""
        return self._newest(functools.reduce(joined, undone, self.undone))

    def _newest(self, void: tuple[Undone, ...]) -> Durable | None:
        good = (place for place in self._finished if not any(some.covers(*place) for some in void))
        newest = max(good, default=None)
        return self._finished[newest] if newest else None

    def move(self, id: SnapshotId, complete: bool, etag: int, recorded: Iterable[Undone]) -> Durable | None:
        """Move LATEST by a conditional write; return None if LATEST was moved since it was read.

        `recorded` are the undone states that the operator knows.

        Raises:
            Violation: If it does not hold.
        """
        if etag != self.etag:
            return None
        parts = [self.parts.get((id, shard)) for shard in range(id.shards)]
        if None in parts or len(set(parts)) != 1:
            raise Violation(f"LATEST would point at a partial or mixed checkpoint: {id} {parts}")
        lineage = parts[0] or FRESH
        check_lineage(lineage)
        if steps_of(lineage) != id.step:
            raise Violation(f"the checkpoint of step {id.step} has trained {steps_of(lineage)} steps")
        if self.latest is not None and (self.latest.round, self.latest.step) > (id.round, id.step):
            raise Violation(f"LATEST goes back from {self.latest} to round {id.round}, step {id.step}")
        for undone in recorded:
            if id.round > undone.round and joined(self.undone, undone) != self.undone:
                raise Violation(f"round {id.round} moves LATEST, which does not say that {undone}")
        if void := next((some for some in self._told if some.covers(id.round, id.step)), None):
            raise Violation(f"LATEST would name what was undone ({void}): round {id.round}, step {id.step}")
        uri = f"s3://bucket/{self.uid}/round-{id.round}/step-{id.step}"
        self.checkpoints[uri] = lineage
        self.latest = Durable(self.uid, id.round, id.step, uri, complete=complete, at=self.clock.now)
        self._finished[(id.round, id.step)] = self.latest
        self.etag += 1
        self.clock.tell(f"LATEST: round {id.round}, step {id.step}{', complete' if complete else ''}")
        return self.latest
