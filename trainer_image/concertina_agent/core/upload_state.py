"""Knowledge of an agent about durable storage, and about its shards that are being shipped. No side effects."""

from __future__ import annotations

import dataclasses
from typing import Optional

from concertina_protocol import Durable, Part, SnapshotId, Storage, StorageHealth, Undone
from concertina_protocol.worker_channel import WantDurable


class UploadState:
    """State of durable storage and of the shards that are being shipped."""

    def __init__(self, storage: Optional[Storage], *, is_named: bool = False) -> None:
        """Initialize the state.

        `storage` is None if the job uses no durable storage. `is_named` is then set if the job specifies one that it
        has not used so far.
        """
        self.storage, self._is_named = storage, is_named
        self.parts: tuple[Part, ...] = ()
        """Parts of this round that are in storage, but not under LATEST."""
        self.undone: tuple[Undone, ...] = ()
        """States that rollbacks made void. LATEST may still name one of these states."""
        self._unshipped: set[tuple[SnapshotId, int]] = set()
        self._complete: set[SnapshotId] = set()
        self._wanted: set[tuple[SnapshotId, int]] = set()
        """Shards of this round that are requested in storage, whether shipped or not."""

    def use(self) -> bool:
        """Start to use the storage that the job specifies; return False if it is used already, or there is none."""
        if self.storage is not None or not self._is_named:
            return False
        self.storage = Storage(StorageHealth.UNKNOWN)
        return True

    @property
    def latest(self) -> Optional[Durable]:
        """Checkpoint that LATEST names, unless it was undone."""
        latest = self.storage.latest if self.storage else None
        return None if latest is None or self.voids(latest.round, latest.step) else latest

    def voids(self, round: int, step: int) -> bool:
        """Return whether that state was undone."""
        return any(rollback.covers(round, step) for rollback in self.undone)

    @property
    def all_shipped(self) -> bool:
        return not self._unshipped

    def outdated(self, round: int) -> bool:
        """Return whether LATEST may have been moved by earlier rounds that this agent did not take part in.

        See decision "Agents that missed a round read LATEST again".
        """
        storage = self.storage
        if storage is None or storage.state == StorageHealth.UNKNOWN:
            return False
        return storage.round is None or storage.round < round - 1

    def new_round(self, round: int, undone: tuple[Undone, ...]) -> None:
        """Begin a round as its member. From now on, its coordinator sends news of LATEST."""
        self.undone = undone
        if self.storage is not None and not self.outdated(round):
            self.storage = dataclasses.replace(self.storage, round=round)
        self.parts = ()
        self._unshipped.clear()
        self._complete.clear()
        self._wanted.clear()

    def wanted(self, message: WantDurable) -> None:
        """Record that a shard must be shipped, which replaces any earlier request for the shard."""
        self._unshipped = {waiting for waiting in self._unshipped if waiting[1] != message.shard}
        self._unshipped.add((message.id, message.shard))
        self._wanted.add((message.id, message.shard))
        if message.complete:
            self._complete.add(message.id)

    def is_wanted(self, id: SnapshotId, shard: int) -> bool:
        return (id, shard) in self._wanted

    def is_coming(self, id: SnapshotId, shard: int) -> bool:
        """Return whether the shard is being shipped, or is in storage."""
        arrived = any((part.id, part.shard) == (id, shard) for part in self.parts)
        return arrived or (id, shard) in self._unshipped

    def shipped(self, part: Part) -> None:
        part = dataclasses.replace(part, complete=part.id in self._complete)
        self.parts = (*(earlier_part for earlier_part in self.parts if earlier_part != part), part)
        self._unshipped.discard((part.id, part.shard))

    def moved(self, durable: Durable, round: int) -> None:
        """Record what LATEST names now. Older parts are no longer waited for."""
        self.storage = Storage(StorageHealth.READY, durable, round=round)
        self.parts = tuple(part for part in self.parts if part.id.step > durable.step)
        self._unshipped = {waiting for waiting in self._unshipped if waiting[0].step > durable.step}

    def seen(self, storage: Storage, round: int) -> bool:
        """Record news of storage; return False if nothing changed. The known LATEST is kept during errors."""
        if storage.state == StorageHealth.ERROR and storage.latest is None:
            previous = self.storage or storage
            storage = dataclasses.replace(storage, latest=previous.latest, round=previous.round)
        else:
            storage = dataclasses.replace(storage, round=round)
        news = self.storage is not None and storage != self.storage
        if news:
            self.storage = storage
        return news

    def has(self, uid: str, step: Optional[int], complete: bool) -> bool:
        """Return whether LATEST is a checkpoint of this job, of that step or later.

        If `complete` is set, it must also be that of the run's end. Without storage, the result is always True.
        """
        latest = self.latest
        if self.storage is None:
            return True
        if latest is None or latest.uid != uid or (step is not None and latest.step < step):
            return False
        return latest.complete or not complete
