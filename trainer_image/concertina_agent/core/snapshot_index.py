"""Index of the snapshots that an agent has. It also selects the snapshots that the agent must delete.

The module has no side effects. The module `files.snapshot_files` reads, writes and deletes the files.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Optional

from concertina_protocol import HeldSnapshot, Restore, SnapshotId

OWN_SLOTS = 3
COPY_SLOTS = 2


class SnapshotIndex:
    """Index of the shards in this agent's volume, keyed by the id of their snapshot.

    A snapshot is a copy of the training state in node memory. The volume has space for a fixed number of snapshots of
    each shard. A new snapshot overwrites the oldest one, which is then also removed from the index.
    """

    def __init__(self, snapshots: Iterable[HeldSnapshot] = ()) -> None:
        self._shards: dict[SnapshotId, set[int]] = {}
        self.replace(snapshots)

    def replace(self, snapshots: Iterable[HeldSnapshot]) -> None:
        """Replace the contents of the index by the snapshots that a scan of the volume has found."""
        self._shards = {h.id: set(h.shards) for h in snapshots}

    def committed(self, id: SnapshotId, shard: int) -> None:
        """Record that a worker of this agent has completely written its shard of a snapshot."""
        self._add(id, shard, OWN_SLOTS)

    def copied(self, id: SnapshotId, shard: int) -> None:
        self._add(id, shard, COPY_SLOTS)

    def newest(self, round: int, shard: int) -> Optional[int]:
        """Return the step of the newest snapshot of this shard in this round, or None if there is none."""
        return max((id.step for id in self._ids_of_shard(round, shard)), default=None)

    def before(self, round: int, restore: Restore) -> Optional[SnapshotId]:
        """Return the newest snapshot of earlier rounds that is older than the snapshot that `round` restores, or None.

        The agent keeps this snapshot until the round has restored its state, because the snapshot to restore may be
        damaged.
        """
        older = (id for id in self._lower(round) if id.step <= restore.step and id != restore.id)
        return max(older, key=lambda id: (id.round, id.step), default=None)

    def keep(self, round: int, *ids: Optional[SnapshotId]) -> tuple[SnapshotId, ...]:
        """Remove the snapshots of rounds before `round`, except the snapshots `ids`, from the index, and return them.

        The caller deletes them. The job's memory request has no space for all snapshots of both an earlier round and
        `round` (plan/state/snapshot_memory.py).
        """
        dropped = tuple(id for id in self._lower(round) if id not in ids)
        for id in dropped:
            del self._shards[id]
        return dropped

    def all(self) -> tuple[HeldSnapshot, ...]:
        """Return all snapshots, newest first."""
        order = sorted(self._shards, key=lambda id: (id.round, id.step, id.layout), reverse=True)
        return tuple(HeldSnapshot(id, tuple(sorted(self._shards[id]))) for id in order)

    def _lower(self, round: int) -> list[SnapshotId]:
        return [id for id in self._shards if id.round < round]

    def _ids_of_shard(self, round: int, shard: int) -> Iterator[SnapshotId]:
        return (id for id, shards in self._shards.items() if id.round == round and shard in shards)

    def _add(self, id: SnapshotId, shard: int, slots: int) -> None:
        self._shards.setdefault(id, set()).add(shard)
        for old in sorted(self._ids_of_shard(id.round, shard), key=lambda id: id.step)[:-slots]:
            self._shards[old].discard(shard)
            if not self._shards[old]:
                del self._shards[old]
